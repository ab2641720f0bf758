// Arrays and copies between tensors, on ordinary memory.
#include "tandem/array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tandem/error.h"

namespace tandem {
namespace {

TEST(Arrays, OfNothingHaveNoMemory) {
  const Array none(Backend::kCpu, DType::kFloat32, {0, 7});
  EXPECT_EQ(none.view().data, nullptr);
  EXPECT_EQ(none.view().num_elements(), 0);
}

TEST(Arrays, OfNegativeExtentAreRefused) {
  try {
    const Array array(Backend::kCpu, DType::kFloat32, {3, -2});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("-2"), std::string::npos) << error.what();
  }
}

TEST(TensorViews, LikeAnotherHaveItsShapeWithoutItsGaps) {
  std::int32_t values[24] = {};
  TensorView gaps(values, DType::kInt32, {2, 2, 3});
  gaps.strides = {12, 4, 1};
  const ConstTensorView dense(values + 1, gaps);
  EXPECT_EQ(dense.data, values + 1);
  EXPECT_EQ(dense.dtype, DType::kInt32);
  EXPECT_EQ(dense.num_dims, 3);
  EXPECT_EQ(dense.shape, gaps.shape);
  EXPECT_EQ(dense.strides, (std::array<std::int64_t, kMaxDims>{6, 3, 1}));
}

TEST(Copies, KeepTheStridesOfBothSides) {
  std::vector<std::int32_t> from(2 * 4 * 5);
  std::iota(from.begin(), from.end(), 0);
  std::vector<std::int32_t> to(2 * 3 * 7, -1);
  ConstTensorView source(from.data(), DType::kInt32, {2, 3, 2});
  source.strides = {4 * 5, 5, 1};
  TensorView destination(to.data(), DType::kInt32, {2, 3, 2});
  destination.strides = {3 * 7, 7, 1};
  copy(destination, source, Backend::kCpu);
  for (int matrix = 0; matrix < 2; ++matrix) {
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 7; ++column) {
        const int expected = column < 2 ? matrix * 20 + row * 5 + column : -1;
        EXPECT_EQ(to[matrix * 21 + row * 7 + column], expected)
            << matrix << ", " << row << ", " << column;
      }
    }
  }
}

TEST(Copies, BetweenOtherShapesOrTypesAreRefused) {
  const Array floats(Backend::kCpu, DType::kFloat32, {2, 3});
  for (const Array& other :
       {Array(Backend::kCpu, DType::kFloat32, {3, 2}), Array(Backend::kCpu, DType::kFloat32, {6}),
        Array(Backend::kCpu, DType::kInt32, {2, 3})}) {
    try {
      copy(floats, other, Backend::kCpu);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace tandem
