// Ranks that are processes and die in mid-operation: their peers say so without any timeout, by
// name, and end in order; nothing is left behind.
#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "support/exchange.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kVictim = 1;

// Ends this process after a while, wherever it stands then.
void die_after(std::chrono::microseconds delay) {
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    ::raise(SIGKILL);
  }).detach();
}

// Names in /dev/shm that speak of this library: none, at any time.
std::vector<std::string> names_in_shm() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string text = entry.path().filename();
    if (text.find("tandem") != std::string::npos) names.push_back(text);
  }
  return names;
}

bool socket_exists(const std::string& name) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    if (line.find(name) != std::string::npos) return true;
  }
  return false;
}

// Runs operations until a peer's death is noticed; the victim dies after `delay`.
int operate_until_the_victim_is_missed(Rank& rank, const Scenario& scenario,
                                       std::chrono::microseconds delay) {
  BufferOptions options = options_for(scenario.shape);
  options.timeout = BufferOptions::kForever;
  Buffer buffer(rank.communicator(), options);
  Exchange exchange(rank, scenario, buffer);
  rank.barrier();
  if (rank.index() == kVictim) die_after(delay);
  const auto start = std::chrono::steady_clock::now();
  try {
    while (std::chrono::steady_clock::now() - start < 30s) exchange.run(buffer);
  } catch (const Error& error) {
    rank.expect(error.code() == ErrorCode::kPeerLost, std::string("other error: ") + error.what());
    rank.expect(error.peer() == kVictim, std::string("wrong culprit: ") + error.what());
    if (rank.failures().empty()) return 0;
    throw std::runtime_error(rank.failures());
  }
  throw std::runtime_error("nobody was missed: " + rank.failures());
}

void expect_only_the_victim_died(const std::vector<ProcessExit>& exits) {
  for (std::size_t rank = 0; rank < exits.size(); ++rank) {
    EXPECT_EQ(exits[rank].signal, rank == kVictim ? SIGKILL : 0) << "rank " << rank;
    if (rank == kVictim) continue;
    EXPECT_EQ(exits[rank].exit_code, 0) << "rank " << rank << ": " << exits[rank].error;
  }
}

// Report: after kill -9 of one rank, its peers hung, and shared memory stayed in /dev/shm.
TEST(Killed, RankKilledInMidOperationIsNamedByItsPeers) {
  std::mt19937 random(std::random_device{}());
  for (const int num_ranks : {2, 3, 2, 4, 2, 3, 2}) {
    Shape shape{.num_ranks = num_ranks,
                .num_experts = num_ranks,
                .hidden = 512,
                .topk = num_ranks,
                .max_tokens = 16,
                .routing = Routing::kFull};
    shape.placement = random() % 2 == 0 ? Placement::kPacked : Placement::kSlotted;
    shape.hook = shape.placement == Placement::kSlotted && random() % 2 == 0;
    const Scenario scenario = make_scenario(shape);
    const std::chrono::microseconds delay(random() % 20'000);
    SCOPED_TRACE(std::to_string(num_ranks) + " ranks, killed after " +
                 std::to_string(delay.count()) + " us");
    expect_only_the_victim_died(run_processes(num_ranks, [&](const Communicator& communicator) {
      Rank rank(communicator);
      return operate_until_the_victim_is_missed(rank, scenario, delay);
    }));
    EXPECT_TRUE(names_in_shm().empty());
  }
}

// A rank that dies while buffers are made.
TEST(Killed, RankKilledDuringSetUpIsNamedByItsPeers) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 5; ++trial) {
    const std::chrono::microseconds delay(random() % 10'000);
    SCOPED_TRACE("killed after " + std::to_string(delay.count()) + " us");
    const auto body = [&](const Communicator& communicator) {
      communicator.barrier();
      if (communicator.rank() == kVictim) die_after(delay);
      try {
        const auto start = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - start < 30s) {
          const Buffer buffer(communicator, options_for(Shape{.num_ranks = 3}));
        }
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kPeerLost && error.peer() == kVictim) return 0;
        throw;
      }
      throw std::runtime_error("nobody was missed");
    };
    expect_only_the_victim_died(run_processes(3, body));
  }
}

// After such a death the same name serves the next group at once: no socket, no file is left.
TEST(Killed, NothingIsLeftBehind) {
  const std::string name = "killed_test_" + std::to_string(::getpid()) + '_';
  const Scenario scenario = make_scenario({.num_experts = 2, .routing = Routing::kFull});
  for (int trial = 0; trial < 3; ++trial) {
    expect_only_the_victim_died(run_processes(2, [&](const Communicator& launched) {
      Rank rank(Communicator::connect(name, launched.rank(), launched.size()));
      return operate_until_the_victim_is_missed(rank, scenario, trial * 500us);
    }));
    EXPECT_FALSE(socket_exists(name));
    EXPECT_TRUE(names_in_shm().empty());
  }
}

// Children do not outlive a parent that is killed itself; see the launcher's tests for the rest.
TEST(Killed, AllRanksMayDieAtOnce) {
  const Scenario scenario = make_scenario({.num_ranks = 3});
  const std::vector<ProcessExit> exits = run_processes(3, [&](const Communicator& communicator) {
    Rank rank(communicator);
    Buffer buffer(communicator, options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    rank.barrier();
    die_after(2ms);
    try {
      for (;;) exchange.run(buffer);
    } catch (const Error&) {  // another has died first
    }
    for (;;) ::pause();
    return 0;
  });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.signal, SIGKILL) << exit.error;
  EXPECT_TRUE(names_in_shm().empty());
}

}  // namespace
}  // namespace tandem::test
