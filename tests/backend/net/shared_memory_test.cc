// Ranks whose user has UCX use shared memory (UCX_TLS), one of which is killed. Whether UCX notices
// depends on the parent: until that has taken note, the process counts as alive.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/launch.h"
#include "support/exchange.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

// More in one operation than the victim's queue holds.
constexpr Shape kShape{
    .num_ranks = 3, .num_experts = 6, .hidden = 4096, .topk = 4, .max_tokens = 128};

// From here on this process and those that it forks have shared memory of their own: what other
// programs have, or have left behind, is not seen. As root alone may.
void leave_shared_memory_of_others() {
  if (::unshare(CLONE_NEWIPC | CLONE_NEWNS) == 0 &&
      ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      ::mount("tmpfs", "/dev/shm", "tmpfs", 0, nullptr) == 0) {
    return;
  }
  const std::string why =
      std::string("shared memory of one's own needs namespaces: ") + std::strerror(errno);
  if (std::getenv("CI") == nullptr) std::cout << "not run: " << why << std::endl;
  throw std::runtime_error(why);
}

// What is there: names in /dev/shm, and System V segments.
std::vector<std::string> shared_memory() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    all.push_back(entry.path());
  }
  std::ifstream segments("/proc/sysvipc/shm");
  std::string line;
  std::getline(segments, line);  // the heading
  while (std::getline(segments, line)) all.push_back("segment " + line);
  return all;
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
  leave_shared_memory_of_others();
  // Processes are waited for in the order of ranks: of rank 0 note is taken at once, of rank 2 once
  // the others have ended.
  for (const int victim : {0, 2}) {
    SCOPED_TRACE(victim);
    expect_victim_to_be_missed(GetParam(), victim);
  }
  EXPECT_EQ(shared_memory(), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Transports, UcxSharedMemory, testing::Values("posix,self", "sysv,self"),
                         [](const auto& given) {
                           const std::string transports = given.param;
                           return transports.substr(0, transports.find(','));
                         });

}  // namespace
}  // namespace tandem::test
