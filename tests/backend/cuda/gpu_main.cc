// Main of the tests that need a GPU: without one it fails and says so; nothing is skipped.
//
// The GPU is looked for in a child: this process must not touch it before the tests whose ranks are
// processes have forked theirs.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tandem/tandem.h"

namespace {

std::string why_no_gpu() {
  const auto exits = tandem::run_processes(1, [](const tandem::Communicator&) {
    for (const tandem::BackendInfo& info : tandem::backends()) {
      if (info.backend != tandem::Backend::kCuda || info.usable) continue;
      std::fprintf(stderr, "no GPU to test on: %s\n", info.why_not.c_str());
      return 1;
    }
    return 0;
  });
  if (exits[0].exit_code == 0 && exits[0].signal == 0) return {};
  return exits[0].error.empty() ? "the GPU tests did not run" : exits[0].error;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  setenv("TANDEM_TEST_BACKEND", "cuda", 1);
  // More than 8 ranks that are threads need a hardware queue each (docs/performance.md).
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  const std::string reason = why_no_gpu();
  if (!reason.empty()) {
    std::fprintf(stderr, "%s\n", reason.c_str());
    return 1;
  }
  return RUN_ALL_TESTS();
}
