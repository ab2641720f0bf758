#include "test_low_latency/experts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "reference/reference.h"
#include "tandem/numeric.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {
namespace {

class DequantiseTest : public testing::TestWithParam<Format> {};

// The tool's reading of a row is independent of the oracle's; they must agree bit for bit.
TEST_P(DequantiseTest, AgreesWithTheOracle) {
  const Shape shape{.ranks = 2, .tokens = 5, .hidden = 700, .topk = 3, .experts = 6, .masked = 2};
  reference::Problem problem = make_problem(shape, 3, GetParam());
  problem.layout = Layout::kPacked;
  for (const reference::RankOutput& output : reference::dispatch(problem)) {
    const std::vector<float> expected = reference::dequantise(output, shape.hidden, GetParam());
    std::vector<float> x(expected.size());
    dequantise(GetParam(), shape.hidden, output.values, output.scales, x);
    ASSERT_GT(x.size(), 0U);
    EXPECT_EQ(std::memcmp(x.data(), expected.data(), x.size() * sizeof(float)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, DequantiseTest,
                         testing::Values(Format::kBFloat16, Format::kFloat16, Format::kFloat32,
                                         Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0));

TEST(Experts, ANeighbourGivesAnotherResult) {
  EXPECT_NE(expert_factor(3), expert_factor(4));
  EXPECT_NE(expert_factor(6), expert_factor(7));
}

TEST(Experts, MultiplyByTheirFactor) {
  const std::vector<float> x = {1.0F, -0.5F};
  std::vector<std::byte> y(4);
  apply_expert(9, x, DType::kBFloat16, y);  // 1 + 9 % 7 = 3
  bfloat16 values[2];
  std::memcpy(values, y.data(), 4);
  EXPECT_EQ(to_float(values[0]), 3.0F);
  EXPECT_EQ(to_float(values[1]), -1.5F);
}

}  // namespace
}  // namespace tandem::tools
