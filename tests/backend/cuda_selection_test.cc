// What a program learns of the CUDA backend on any machine: it is listed, works, or says why not.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tandem/tandem.h"

namespace tandem {
namespace {

BackendInfo cuda_info() {
  const std::vector<BackendInfo> all = backends();
  return *std::find_if(all.begin(), all.end(),
                       [](const BackendInfo& info) { return info.backend == Backend::kCuda; });
}

TEST(CudaSelection, IsListedWhetherBuiltOrNot) {
  EXPECT_EQ(std::ranges::count(backends(), Backend::kCuda, &BackendInfo::backend), 1);
  EXPECT_FALSE(cuda_info().usable && !cuda_info().built);
}

TEST(CudaSelection, SaysWhyItIsNotUsable) {
  EXPECT_EQ(cuda_info().usable, cuda_info().why_not.empty()) << cuda_info().why_not;
}

TEST(CudaSelection, BufferIsMadeOrRefusedAsInfoSays) {
  std::string refusal;
  run_threads(1, [&](const Communicator& communicator) {
    try {
      const Buffer buffer(communicator, {.backend = Backend::kCuda, .max_hidden = 16});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
      refusal = error.what();
    }
  });
  EXPECT_EQ(refusal.empty(), cuda_info().usable) << refusal;
}

TEST(CudaSelection, ArrayIsMadeOrRefusedAsInfoSays) {
  bool made = false;
  try {
    made = Array(Backend::kCuda, DType::kFloat32, {4}).view().data != nullptr;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
  }
  EXPECT_EQ(made, cuda_info().usable);
}

}  // namespace
}  // namespace tandem
