// Ranks on several hosts that set things up: exchanges, buffers, and what is said when one does not
// come or is gone.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <thread>

#include "runtime/bootstrap.h"
#include "runtime/launch.h"
#include "runtime/network.h"
#include "support/hosts.h"
#include "support/shared.h"
#include "tandem/tandem.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;
using runtime::require;

void run_on_hosts(int num_ranks, const std::function<void(const Communicator&)>& body,
                  const CommunicatorOptions& options = {}, int victim = -1) {
  const auto exits =
      run_processes(num_ranks, connect_on_hosts(num_ranks, 3, options), [&](const Communicator& c) {
        body(c);
        return 0;
      });
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
    EXPECT_EQ(exits[rank].signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
  }
}

TEST(NetSetUp, HostsOfOneNameAreTwoHosts) {
  // Namespaces of one machine: same name, same kernel.
  run_on_hosts(4, [](const Communicator& communicator) {
    auto& bootstrap = *communicator.bootstrap();
    require(bootstrap.network() != nullptr, "there is a network");
    const std::vector<int> neighbours = communicator.rank() % 3 == 0
                                            ? std::vector<int>{0, 3}
                                            : std::vector<int>{communicator.rank()};
    require(bootstrap.host_ranks() == neighbours, "who is on this host");
    require(bootstrap.host().size() == static_cast<int>(neighbours.size()), "size of the host");
  });
}

TEST(NetSetUp, EveryRankHearsEveryOther) {
  run_on_hosts(5, [](const Communicator& communicator) {
    for (const std::size_t length : {0U, 1U, 100'000U, 3'000'000U}) {
      const std::vector<std::byte> own(length + communicator.rank(),
                                       static_cast<std::byte>(communicator.rank()));
      const auto all = communicator.all_gather(own);
      for (int peer = 0; peer < 5; ++peer) {
        require(all[peer] == std::vector<std::byte>(length + peer, static_cast<std::byte>(peer)),
                "the message of rank " + std::to_string(peer));
      }
      communicator.barrier();
    }
  });
}

// Ranks start while the link of one of them is down, and meet once it is `up`: which is done by a
// process, since a thread beside ranks that are forked would leave locks behind in them.
void expect_to_be_waited_for(int late, const std::function<void(int host, bool up)>& set_link) {
  constexpr int kNumRanks = 3;
  set_link(late, false);
  const auto connect = connect_on_hosts(kNumRanks, 3);
  const auto exits = run_processes(
      kNumRanks + 1,
      [&](int process) {
        if (process < kNumRanks) return connect(process);
        std::this_thread::sleep_for(500ms);
        set_link(late, true);
        return Communicator::connect("lifts", 0, 1);
      },
      [](const Communicator& communicator) {
        if (communicator.size() == 1) return 0;
        require(communicator.bootstrap()->network() != nullptr, "there is a network");
        communicator.barrier();
        return 0;
      });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

// As in a container whose network is attached while its processes start.
TEST(NetSetUp, RankThatStartsBeforeItsLinkIsUpIsWaitedFor) {
  for (const int late : {0, 1}) {
    expect_to_be_waited_for(late, [](int host, bool up) { hosts().set_link(host, up); });
  }
}

// As where a switch starts with the hosts: the interface is up and has its address and its way.
TEST(NetSetUp, RankThatStartsBeforeTheOtherEndOfItsLinkIsUpIsWaitedFor) {
  const auto has_carrier = [](int host) {
    return hosts().run(host, {"ip", "link", "show", "eth0"}).find("NO-CARRIER") ==
           std::string::npos;
  };
  for (const int late : {0, 1}) {
    expect_to_be_waited_for(late, [&](int host, bool up) {
      hosts().run(tools::NetworkHosts::kSwitch,
                  {"ip", "link", "set", "port" + std::to_string(host), up ? "up" : "down"});
      // This end takes note of it about once a second.
      while (!up && has_carrier(host)) std::this_thread::sleep_for(1ms);
    });
  }
}

TEST(NetSetUp, RankWithoutAWayToTheOthersSaysSo) {
  hosts().set_link(1, false);
  const auto exits = run_processes(2, connect_on_hosts(2, 3, {.timeout = 500ms}),
                                   [](const Communicator&) { return 0; });
  hosts().set_link(1, true);
  EXPECT_NE(exits[0].error.find("rank 1 of 2 did not come"), std::string::npos) << exits[0].error;
  EXPECT_NE(exits[1].error.find("no way to"), std::string::npos) << exits[1].error;
}

TEST(NetSetUp, AGatheringFunctionThatReachesOtherHostsIsEnough) {
  run_on_hosts(3, [](const Communicator& outer) {
    const auto communicator = Communicator::from_all_gather(
        outer.rank(), outer.size(),
        [&](std::span<const std::byte> message) { return outer.all_gather(message); });
    require(communicator.bootstrap()->network() != nullptr, "there is a network");
    communicator.barrier();
  });
}

// Also to that rank, in the exchange after the one that it missed at the latest: the others' parts
// of that one are there, their word that they gave it up may be on its way still.
TEST(NetSetUp, RankThatDoesNotComeIsNamedToAll) {
  const runtime::SharedCounter told;
  run_on_hosts(4,
               [&](const Communicator& communicator) {
                 const auto expect_to_be_told_within = [&](int num_barriers) {
                   runtime::require_error(ErrorCode::kTimeout, 2,
                                          {"rank 2 of 4 did not come to barrier"}, [&] {
                                            for (int time = 0; time < num_barriers; ++time)
                                              communicator.barrier();
                                          });
                 };
                 if (communicator.rank() == 2) {
                   told.wait_for(3);  // away while the others' time runs out
                   expect_to_be_told_within(2);
                 } else {
                   expect_to_be_told_within(1);
                   told.add_one();
                 }
                 expect_to_be_told_within(1);  // and again
               },
               {.timeout = 2s});  // in which the others meet, and come
}

TEST(NetSetUp, RanksInDifferentExchangesAreToldSo) {
  run_on_hosts(3, [](const Communicator& communicator) {
    try {
      if (communicator.rank() == 1) {
        static_cast<void>(communicator.all_gather({}));
      } else {
        communicator.barrier();
      }
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kMismatch, error.what());
      return;
    }
    require(false, "an error is thrown");
  });
}

TEST(NetSetUp, RankThatIsKilledIsNamedBeforeTheTimeout) {
  const Shared<Gathering> all_ready;
  run_on_hosts(
      4,
      [&](const Communicator& communicator) {
        all_ready->await(4);
        if (communicator.rank() == 1) {
          std::this_thread::sleep_for(300ms);  // until the others wait, and send nothing more
          ::raise(SIGKILL);
        }
        const auto start = std::chrono::steady_clock::now();
        runtime::require_error(ErrorCode::kPeerLost, 1, {"rank 1"},
                               [&] { communicator.barrier(); });
        require(std::chrono::steady_clock::now() - start < 20s, "it is told before the timeout");
      },
      {}, 1);
}

TEST(NetSetUp, RankThatLeavesIsNamed) {
  run_on_hosts(3, [](const Communicator& communicator) {
    communicator.barrier();
    if (communicator.rank() == 2) return;
    runtime::require_error(ErrorCode::kPeerLost, 2, {"rank 2 has closed its communicator"},
                           [&] { communicator.barrier(); });
  });
}

// Rank 2 is stopped while it waits for the others, and goes on when they have come, rank 0 has
// left, and rank 1 has missed it in the next exchange.
TEST(NetSetUp, ExchangeThatIsCompleteSurvivesTheFailureOfTheNext) {
  struct State {
    std::atomic<pid_t> waits = 0;
    std::atomic<bool> is_stopped = false;
    std::atomic<bool> is_over = false;
  };
  const Shared<State> state;
  run_on_hosts(3, [&](const Communicator& communicator) {
    const auto barrier = [&] { communicator.barrier(); };
    std::jthread stopper;
    if (communicator.rank() == 1) {
      stopper = std::jthread([&] {
        while (state->waits == 0) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(200ms);
        ::kill(state->waits, SIGSTOP);
        state->is_stopped = true;
        // Not for ever: it may not have sent its part.
        for (int i = 0; i < 5000 && !state->is_over; ++i) std::this_thread::sleep_for(1ms);
        ::kill(state->waits, SIGCONT);
      });
    }
    if (communicator.rank() == 2) state->waits = ::getpid();
    while (communicator.rank() != 2 && !state->is_stopped) std::this_thread::sleep_for(1ms);
    barrier();
    if (communicator.rank() == 0) return;
    runtime::require_error(ErrorCode::kPeerLost, 0, {"rank 0 has closed"}, barrier);
    state->is_over = true;
  });
}

TEST(NetSetUp, BufferThatOneRankCannotHaveIsRefusedOnAll) {
  run_on_hosts(3, [](const Communicator& communicator) {
    const BufferOptions options{.num_experts = communicator.rank() == 1 ? -1 : 6,
                                .max_tokens = 8,
                                .max_hidden = 64,
                                .max_topk = 2};
    const int culprit = communicator.rank() == 1 ? -1 : 1;  // it is told about itself
    runtime::require_error(ErrorCode::kInvalidArgument, culprit, {"num_experts"},
                           [&] { Buffer buffer(communicator, options); });
    communicator.barrier();
  });
}

int count_entries(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

// One that has been joined is listed for a moment more.
void require_one_thread() {
  const auto limit = std::chrono::steady_clock::now() + 60s;
  while (count_entries("/proc/self/task") > 1) {
    require(std::chrono::steady_clock::now() < limit, "no thread is left behind");
    std::this_thread::sleep_for(1ms);
  }
}

TEST(NetSetUp, CommunicatorsAndBuffersLeaveNothingBehind) {
  constexpr int kRounds = 4;
  static_cast<void>(hosts());
  std::vector<std::string> addresses;
  for (int round = 0; round < kRounds; ++round) addresses.push_back(unused_address());
  const auto exits = run_processes(
      3,
      [&](int rank) {
        hosts().enter(rank);
        int descriptors = 0;
        for (int round = 0; round < kRounds; ++round) {
          {
            const auto communicator =
                Communicator::connect_across_hosts(addresses[round], kSecret, rank, 3);
            Buffer buffer(communicator,
                          {.num_experts = 3, .max_tokens = 4, .max_hidden = 64, .max_topk = 1});
          }
          if (round == 1) descriptors = count_entries("/proc/self/fd");
        }
        require(count_entries("/proc/self/fd") == descriptors, "no descriptor is left behind");
        require_one_thread();
        return Communicator::connect(std::to_string(rank), 0, 1);
      },
      [](const Communicator&) { return 0; });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

TEST(NetSetUp, DoorsThatCannotBeOpenedAreRefusedOnAll) {
  const std::string address = unused_address();
  run_on_hosts(2, [&](const Communicator& communicator) {
    BufferOptions options{.num_experts = 4, .max_tokens = 8, .max_hidden = 64, .max_topk = 2};
    options.door_address = address;
    runtime::require_error(ErrorCode::kInvalidArgument, -1, {"door is empty"},
                           [&] { Buffer buffer(communicator, options); });
    options.door = "a door";
    if (communicator.rank() != 0) options.door_address = "";
    const Buffer first(communicator, options);
    runtime::require_error(ErrorCode::kUnsupported, communicator.rank() == 0 ? -1 : 0,
                           {"one buffer"}, [&] { Buffer second(communicator, options); });
    communicator.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
