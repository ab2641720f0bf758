#include "run_layer/experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "common/hash.h"
#include "run_layer/rank_layer.h"

namespace tandem::tools {
namespace {

float gelu_tanh(float v) {
  return 0.5F * v * (1 + std::tanh(0.79788456F * (v + 0.044715F * v * v * v)));
}

LayerWeights random_weights(int num_experts, int hidden, int ffn) {
  LayerWeights weights{num_experts, hidden, ffn, {}, {}};
  const auto count = static_cast<std::size_t>(num_experts * hidden * ffn);
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = [&](std::uint64_t salt) {
      return to_bfloat16(static_cast<float>(mix(i + salt) >> 40) * 0x1p-24F - 0.5F);
    };
    weights.w1.push_back(value(1));
    weights.w2.push_back(value(1'000'000));
  }
  return weights;
}

std::vector<bfloat16> random_rows(int rows, int hidden) {
  std::vector<bfloat16> x;
  for (int i = 0; i < rows * hidden; ++i) {
    x.push_back(
        to_bfloat16(static_cast<float>(mix(static_cast<std::uint64_t>(i)) >> 40) * 0x1p-24F));
  }
  return x;
}

TEST(Expert, ComputesTwoProductsAndAGelu) {
  // One channel, two inner: y = gelu(2 x) * 3 + gelu(-x) * 0.5.
  const LayerWeights weights{
      1, 1, 2, {to_bfloat16(2), to_bfloat16(-1)}, {to_bfloat16(3), to_bfloat16(0.5F)}};
  const std::vector<bfloat16> x = {to_bfloat16(1.5F)};
  std::vector<float> y(1);
  Expert(weights, 0).run(x, y);
  EXPECT_NEAR(y[0], gelu_tanh(3.0F) * 3 + gelu_tanh(-1.5F) * 0.5F, 1e-5);
}

TEST(Expert, SumsInTheOrderOfTheInnerIndexWithEveryRounding) {
  const LayerWeights weights = random_weights(1, 37, 1);
  const std::vector<bfloat16> x = random_rows(1, 37);
  volatile float sum = 0;  // volatile: each step is rounded and none is reordered
  for (std::size_t i = 0; i < 37; ++i) {
    volatile float product = to_float(x[i]) * to_float(weights.w1[i]);
    sum = sum + product;
  }
  std::vector<float> y(37);
  Expert(weights, 0).run(x, y);
  const double v = sum;
  const auto inner = static_cast<float>(
      0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
  EXPECT_EQ(y[5], inner * to_float(weights.w2[5]));
}

TEST(Expert, ARowsResultDoesNotDependOnItsNeighbours) {
  const LayerWeights weights = random_weights(2, 70, 130);
  const std::vector<bfloat16> x = random_rows(21, 70);
  const Expert expert(weights, 1);
  std::vector<float> together(x.size());
  expert.run(x, together);
  for (std::size_t row = 0; row < 21; ++row) {
    std::vector<float> alone(70);
    expert.run(std::span(x).subspan(row * 70, 70), alone);
    EXPECT_EQ(std::memcmp(alone.data(), together.data() + row * 70, 70 * sizeof(float)), 0);
  }
}

TEST(RunAlone, WeighsTheSelectedExpertsAndNothingElse) {
  const LayerWeights weights = random_weights(3, 8, 4);
  LayerInput input{.num_tokens = 2, .topk = 2};
  input.x = random_rows(2, 8);
  input.topk_idx = {2, 0, -1, -1};
  input.topk_weights = {0.25F, 2.0F, 1.0F, 1.0F};
  const std::vector<float> result = run_alone(weights, input);
  std::vector<float> first(8), second(8);
  const std::span<const bfloat16> x = std::span(input.x).first(8);
  Expert(weights, 2).run(x, first);
  Expert(weights, 0).run(x, second);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(result[i], 0.25F * first[i] + 2.0F * second[i]);
    EXPECT_EQ(result[8 + i], 0.0F);
  }
}

TEST(FirstToken, SplitsAsEvenlyAsPossible) {
  EXPECT_EQ(first_token(10, 3, 0), 0);
  EXPECT_EQ(first_token(10, 3, 1), 4);
  EXPECT_EQ(first_token(10, 3, 2), 7);
  EXPECT_EQ(first_token(10, 3, 3), 10);
  EXPECT_EQ(first_token(2, 4, 3), 2);
}

}  // namespace
}  // namespace tandem::tools
