#include "common/memory.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace tandem::tools {
namespace {

TEST(RowsOf, CutsAPaddedTensorAcrossItsExperts) {
  std::vector<std::int32_t> data(2 * 3 * 4);
  std::iota(data.begin(), data.end(), 0);
  const TensorView rows = rows_of(view_of(data.data(), {2, 3, 4}), 3, 2);
  EXPECT_EQ(rows.num_dims, 2);
  EXPECT_EQ(rows.shape[0], 2);
  EXPECT_EQ(rows.shape[1], 4);
  EXPECT_EQ(*rows.as<std::int32_t>(), 12);
}

TEST(RowsOf, KeepsThePitchOfAStridedView) {
  std::vector<std::int32_t> data(4 * 8);
  std::iota(data.begin(), data.end(), 0);
  TensorView strided = view_of(data.data(), {4, 5});
  strided.strides[0] = 8;
  const Memory memory(Backend::kCpu);
  EXPECT_EQ(memory.download<std::int32_t>(rows_of<const void>(strided, 1, 2)),
            (std::vector<std::int32_t>{8, 9, 10, 11, 12, 16, 17, 18, 19, 20}));
}

TEST(RowsOf, CutsAVector) {
  std::vector<std::int32_t> data = {5, 6, 7, 8};
  const Memory memory(Backend::kCpu);
  EXPECT_EQ(memory.download<std::int32_t>(rows_of<const void>(view_of(data.data(), {4}), 1, 2)),
            (std::vector<std::int32_t>{6, 7}));
}

TEST(Memory, UploadThenDownloadGivesTheSame) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const Memory memory(Backend::kCpu);
  const Array array = memory.array_of(values.data(), DType::kFloat32, {2, 3});
  EXPECT_EQ(memory.download<float>(array), values);
}

TEST(Memory, EmptyTensorNeedsNoData) {
  const Memory memory(Backend::kCpu);
  const Array array = memory.array_of(nullptr, DType::kFloat32, {0, 3});
  EXPECT_TRUE(memory.download<float>(array).empty());
}

}  // namespace
}  // namespace tandem::tools
