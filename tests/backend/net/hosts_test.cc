// The hosts of the tests themselves.
#include "support/hosts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tandem::test {
namespace {

// A copy of a process that is made while a thread allocates may find the allocator locked for ever;
// AddressSanitizer's does, in a thread that has little of its own yet.
TEST(NetHosts, CommandsRunWhileOtherThreadsAllocate) {
  constexpr int kNumBlocks = 1000;
  const tools::NetworkHosts& all = hosts();
  std::atomic<bool> is_done = false;
  std::vector<std::jthread> others;
  for (int i = 0; i < 4; ++i) {
    others.emplace_back([&] {
      while (!is_done) {
        std::vector<std::unique_ptr<char[]>> blocks;
        for (int block = 0; block < kNumBlocks; ++block) {
          blocks.push_back(std::make_unique<char[]>(16 + block % 50 * 16));
        }
      }
    });
  }
  for (int i = 0; i < 300; ++i) {
    std::jthread([&] { EXPECT_EQ(all.run(i % all.size(), {"echo", "there"}), "there\n"); });
  }
  is_done = true;
}

TEST(NetHosts, ACommandThatFailsOrIsMissingIsNamed) {
  const auto said = [](const std::vector<std::string>& command) -> std::string {
    try {
      static_cast<void>(hosts().run(0, command));
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "nothing";
  };
  EXPECT_EQ(said({"sh", "-c", "echo badly; exit 3"}), "'sh -c echo badly; exit 3' failed: badly\n");
  EXPECT_EQ(said({"no-such-command"}), "the command 'no-such-command' is missing");
}

}  // namespace
}  // namespace tandem::test
