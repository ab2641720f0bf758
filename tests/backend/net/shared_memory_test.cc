// Ranks whose user has UCX use shared memory (UCX_TLS), one of which is killed. Whether UCX notices
// depends on the parent: until that has taken note, the process counts as alive.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "runtime/launch.h"
#include "support/exchange.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

// More in one operation than the victim's queue holds.
constexpr Shape kShape{
    .num_ranks = 3, .num_experts = 6, .hidden = 4096, .topk = 4, .max_tokens = 128};

// What UCX makes of shared memory, and has not taken back: names in /dev/shm, and System V segments
// that nobody has attached.
std::set<std::string> left_behind() {
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("ucx_shm")) left.insert(name);
  }
  std::ifstream segments("/proc/sysvipc/shm");
  std::string line;
  std::getline(segments, line);  // the heading
  for (long key, id, mode, size, creator, last, num_attached;
       segments >> key >> id >> mode >> size >> creator >> last >> num_attached;) {
    std::getline(segments, line);
    if (num_attached == 0 && ::kill(static_cast<pid_t>(creator), 0) != 0) {
      left.insert("segment " + std::to_string(id));
    }
  }
  return left;
}

void expect_victim_to_be_missed(const char* transports, int victim) {
  const Scenario scenario = make_scenario(kShape);
  const Shared<Gathering> all_ready;
  const auto exits = run_processes(kShape.num_ranks, [&](const Communicator& together) {
    ::setenv("UCX_TLS", transports, 1);
    ::setenv("UCX_KEEPALIVE_INTERVAL", "50ms", 1);  // or it would ask after 20 s
    Rank rank(Communicator::from_all_gather(
        together.rank(), together.size(),
        [&](std::span<const std::byte> message) { return together.all_gather(message); },
        {.timeout = 20s, .share_memory = false}));
    BufferOptions options = options_for(kShape);
    options.timeout = 3s;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
    all_ready->await(kShape.num_ranks);
    if (rank.index() == victim) ::raise(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    const auto error = runtime::error_of([&] {
      while (std::chrono::steady_clock::now() - start < 30s) exchange.run(buffer);
    });
    if (!rank.failures().empty()) throw std::runtime_error(rank.failures());
    runtime::require(error.has_value(), "the victim is missed");
    runtime::require(error->code() == ErrorCode::kPeerLost || error->code() == ErrorCode::kTimeout,
                     error->what());
    runtime::require(error->peer() == victim, error->what());
    return 0;
  });
  for (int rank = 0; rank < kShape.num_ranks; ++rank) {
    EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
    EXPECT_EQ(exits[rank].signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
  }
}

class UcxSharedMemory : public testing::TestWithParam<const char*> {};

// Report: a rank went on for ever where its timeout was 30 s: UCX kept asking after the victim, for
// which its queue had no room, and that counted as progress.
TEST_P(UcxSharedMemory, KilledRankIsMissedInTimeAndLeavesNothing) {
  // Processes are waited for in the order of ranks: of rank 0 note is taken at once, of rank 2 once
  // the others have ended.
  for (const int victim : {0, 2}) {
    SCOPED_TRACE(victim);
    expect_victim_to_be_missed(GetParam(), victim);
  }
  // Of what is there now; what other programs have comes and goes.
  std::set<std::string> left = left_behind();
  const auto limit = std::chrono::steady_clock::now() + 20s;
  while (!left.empty() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(10ms);
    const std::set<std::string> now = left_behind();
    std::erase_if(left, [&](const std::string& name) { return !now.contains(name); });
  }
  EXPECT_TRUE(left.empty()) << testing::PrintToString(left);
}

INSTANTIATE_TEST_SUITE_P(Transports, UcxSharedMemory, testing::Values("posix,self", "sysv,self"),
                         [](const auto& given) {
                           const std::string transports = given.param;
                           return transports.substr(0, transports.find(','));
                         });

}  // namespace
}  // namespace tandem::test
