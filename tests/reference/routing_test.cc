// The oracle's rows, counts and sums against values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "reference/problem_builder.h"

namespace tandem::reference {
namespace {

using Int32s = std::vector<std::int32_t>;
using Int64s = std::vector<std::int64_t>;
using Floats = std::vector<float>;

// Two ranks; experts 0 and 1 on rank 0, expert 2 on rank 1. Rank 0's token 1 selects once, its
// token 2 selects expert 2 twice.
//   rank 0: token 0 -> 0, 2   token 1 -> none, 1   token 2 -> 2, 2
//   rank 1: token 0 -> 1, 0
Problem two_ranks(Layout layout, int row_alignment = 1) {
  Problem problem{.num_ranks = 2,
                  .num_experts = 3,
                  .hidden = 1,
                  .topk = 2,
                  .max_tokens = 3,
                  .x_dtype = DType::kFloat32,
                  .format = Format::kFloat32,
                  .layout = layout,
                  .row_alignment = row_alignment};
  problem.ranks = {rank_input(3, {1, 2, 3}, {0, 2, -1, 1, 2, 2}, {0.5F, 0.25F, 9, 2, 0.5F, 0.125F}),
                   rank_input(1, {11}, {1, 0}, {0.25F, 2})};
  return problem;
}

TEST(Oracle, PaddedLayout) {
  const std::vector<RankOutput> outputs = dispatch(two_ranks(Layout::kPadded));
  ASSERT_EQ(outputs.size(), 2U);

  const RankOutput& rank0 = outputs[0];
  EXPECT_EQ(rank0.experts, (std::vector<int>{0, 1}));
  EXPECT_EQ(rank0.counts, (Int32s{2, 2}));
  EXPECT_EQ(rank0.offsets, (Int64s{0, 6, 12}));
  EXPECT_EQ(rank0.ranges, (Int64s{range(0, 1), range(1, 1), range(0, 1), range(1, 1)}));
  EXPECT_EQ(rank0.num_rows, 12);
  EXPECT_EQ(rank0.source_ranks, (Int32s{0, 1, -1, -1, -1, -1, 0, 1, -1, -1, -1, -1}));
  EXPECT_EQ(rank0.source_tokens, (Int32s{0, 0, -1, -1, -1, -1, 1, 0, -1, -1, -1, -1}));
  EXPECT_EQ(values_of<float>(rank0.values), (Floats{1, 11, 0, 0, 0, 0, 2, 11, 0, 0, 0, 0}));
  EXPECT_TRUE(rank0.scales.empty());

  const RankOutput& rank1 = outputs[1];
  EXPECT_EQ(rank1.experts, (std::vector<int>{2}));
  EXPECT_EQ(rank1.counts, (Int32s{3}));
  EXPECT_EQ(rank1.offsets, (Int64s{0, 6}));
  EXPECT_EQ(rank1.ranges, (Int64s{range(0, 3), range(3, 0)}));
  EXPECT_EQ(rank1.source_tokens, (Int32s{0, 2, 2, -1, -1, -1}));
  EXPECT_EQ(values_of<float>(rank1.values), (Floats{1, 3, 3, 0, 0, 0}));
}

TEST(Oracle, PackedLayout) {
  const std::vector<RankOutput> outputs = dispatch(two_ranks(Layout::kPacked));
  EXPECT_EQ(outputs[0].offsets, (Int64s{0, 2, 4}));
  EXPECT_EQ(outputs[0].num_rows, 4);
  EXPECT_EQ(outputs[0].source_ranks, (Int32s{0, 1, 0, 1}));
  EXPECT_EQ(outputs[0].source_tokens, (Int32s{0, 0, 1, 0}));
  EXPECT_EQ(values_of<float>(outputs[0].values), (Floats{1, 11, 2, 11}));
  EXPECT_EQ(outputs[1].offsets, (Int64s{0, 3}));
  EXPECT_EQ(values_of<float>(outputs[1].values), (Floats{1, 3, 3}));
}

TEST(Oracle, PackedLayoutAligned) {
  const std::vector<RankOutput> outputs = dispatch(two_ranks(Layout::kPacked, 4));
  EXPECT_EQ(outputs[0].counts, (Int32s{2, 2}));
  EXPECT_EQ(outputs[0].offsets, (Int64s{0, 4, 8}));
  EXPECT_EQ(outputs[0].ranges, (Int64s{range(0, 1), range(1, 1), range(0, 1), range(1, 1)}));
  EXPECT_EQ(outputs[0].source_tokens, (Int32s{0, 0, -1, -1, 1, 0, -1, -1}));
  EXPECT_EQ(values_of<float>(outputs[0].values), (Floats{1, 11, 0, 0, 2, 11, 0, 0}));
  EXPECT_EQ(outputs[1].offsets, (Int64s{0, 4}));
  EXPECT_EQ(outputs[1].source_tokens, (Int32s{0, 2, 2, -1}));
}

TEST(Oracle, AlignmentThatIsNoPowerOfTwo) {
  const std::vector<RankOutput> outputs = dispatch(two_ranks(Layout::kPacked, 3));
  EXPECT_EQ(outputs[0].offsets, (Int64s{0, 3, 6}));
  EXPECT_EQ(outputs[1].offsets, (Int64s{0, 3}));
}

TEST(Oracle, CombineWeighsInTheOrderOfK) {
  const float nan = std::numeric_limits<float>::quiet_NaN();  // rows without tokens are not read
  const std::vector<std::vector<std::byte>> y{
      bytes_of(Floats{100, 200, nan, nan, nan, nan, 300, 400, nan, nan, nan, nan}),
      bytes_of(Floats{500, 600, 700, nan, nan, nan})};
  const auto out = combine(two_ranks(Layout::kPadded), y, DType::kFloat32);
  ASSERT_EQ(out.size(), 2U);
  // 0.5 * 100 + 0.25 * 500; 2 * 300; 0.5 * 600 + 0.125 * 700
  EXPECT_EQ(values_of<float>(out[0]), (Floats{175, 600, 387.5F}));
  EXPECT_EQ(values_of<float>(out[1]), (Floats{500}));  // 0.25 * 400 + 2 * 200
}

TEST(Oracle, CombineFollowsThePackedLayout) {
  const std::vector<std::vector<std::byte>> y{bytes_of(Floats{100, 200, 0, 0, 300, 400, 0, 0}),
                                              bytes_of(Floats{500, 600, 700, 0})};
  const auto out = combine(two_ranks(Layout::kPacked, 4), y, DType::kFloat32);
  EXPECT_EQ(values_of<float>(out[0]), (Floats{175, 600, 387.5F}));
  EXPECT_EQ(values_of<float>(out[1]), (Floats{500}));
}

// One rank, one expert, tokens of one channel that select it `topk` times: a bare weighted sum.
Problem one_sum(int topk, const Floats& weights) {
  Problem problem{.num_ranks = 1,
                  .num_experts = 1,
                  .hidden = 1,
                  .topk = topk,
                  .max_tokens = topk,
                  .x_dtype = DType::kFloat32,
                  .format = Format::kFloat32};
  problem.ranks = {rank_input(1, {0}, Int64s(topk, 0), weights)};
  return problem;
}

TEST(Oracle, CombineRoundsEveryProductAndEverySum) {
  // 2^24 + 1 rounds to 2^24, twice; the other order keeps both ones.
  Floats y(3 * 1, 0);
  y = {0x1p24F, 1, 1};
  EXPECT_EQ(values_of<float>(combine(one_sum(3, {1, 1, 1}), {bytes_of(y)}, DType::kFloat32)[0]),
            (Floats{0x1p24F}));
  y = {1, 1, 0x1p24F};
  EXPECT_EQ(values_of<float>(combine(one_sum(3, {1, 1, 1}), {bytes_of(y)}, DType::kFloat32)[0]),
            (Floats{0x1p24F + 2}));
  // (1 + 2^-12)^2 drops its 2^-24 before the sum: a fused operation would leave it.
  y = {-(1 + 0x1p-11F), 1 + 0x1p-12F};
  EXPECT_EQ(
      values_of<float>(combine(one_sum(2, {1, 1 + 0x1p-12F}), {bytes_of(y)}, DType::kFloat32)[0]),
      (Floats{0}));
}

TEST(Oracle, CombineRoundsToTheOutputType) {
  // 1 + 2^-8 is halfway between two bf16 and goes to the even one, 1; 3 halves up to even.
  const std::vector<bfloat16> narrow{to_bfloat16(1), to_bfloat16(0x1p-8F)};
  auto out =
      values_of<bfloat16>(combine(one_sum(2, {1, 1}), {bytes_of(narrow)}, DType::kBFloat16)[0]);
  EXPECT_EQ(out[0].bits, 0x3f80);
  out = values_of<bfloat16>(combine(one_sum(2, {1, 3}), {bytes_of(narrow)}, DType::kBFloat16)[0]);
  EXPECT_EQ(out[0].bits, 0x3f82);
  const std::vector<float16> half{to_float16(60000), to_float16(6000)};
  const auto overflow =
      values_of<float16>(combine(one_sum(2, {1, 1}), {bytes_of(half)}, DType::kFloat16)[0]);
  EXPECT_EQ(overflow[0].bits, 0x7c00);
}

TEST(Oracle, CombineOfNothingIsPositiveZero) {
  Problem problem = two_ranks(Layout::kPacked);
  for (RankInput& input : problem.ranks) {
    for (std::int64_t& expert : input.topk_idx) expert = -7;
  }
  for (const RankOutput& output : dispatch(problem)) EXPECT_EQ(output.num_rows, 0);
  const auto out = combine(problem, {{}, {}}, DType::kFloat32);
  EXPECT_EQ(out[0], std::vector<std::byte>(3 * sizeof(float)));
  EXPECT_EQ(out[1], std::vector<std::byte>(1 * sizeof(float)));
}

TEST(Oracle, CombineCarriesNanAndInfinity) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto sum = [](const Floats& y, const Floats& weights) {
    return values_of<float>(combine(one_sum(2, weights), {bytes_of(y)}, DType::kFloat32)[0])[0];
  };
  EXPECT_TRUE(std::isnan(sum({nan, 1}, {0, 1})));
  EXPECT_TRUE(std::isnan(sum({infinity, -infinity}, {1, 1})));
  EXPECT_EQ(sum({infinity, 1}, {1, 1}), infinity);
}

TEST(Oracle, ExpertsSplitAsEvenlyAsPossible) {
  const auto sizes = [](int num_experts, int num_ranks) {
    Problem problem{.num_ranks = num_ranks,
                    .num_experts = num_experts,
                    .x_dtype = DType::kFloat32,
                    .format = Format::kFloat32};
    problem.ranks.resize(num_ranks);
    std::vector<int> result;
    for (const RankOutput& output : dispatch(problem)) {
      result.push_back(static_cast<int>(output.experts.size()));
    }
    return result;
  };
  EXPECT_EQ(sizes(5, 3), (std::vector<int>{2, 2, 1}));
  EXPECT_EQ(sizes(2, 3), (std::vector<int>{1, 1, 0}));
  EXPECT_EQ(sizes(256, 3), (std::vector<int>{86, 85, 85}));
  EXPECT_EQ(sizes(8, 2), (std::vector<int>{4, 4}));
}

TEST(Oracle, ExpertOwnersDecideWhereRowsGo) {
  Problem problem = two_ranks(Layout::kPacked);
  problem.expert_owners = {1, 0, 1};
  const std::vector<RankOutput> outputs = dispatch(problem);
  EXPECT_EQ(outputs[0].experts, (std::vector<int>{1}));
  EXPECT_EQ(values_of<float>(outputs[0].values), (Floats{2, 11}));
  EXPECT_EQ(outputs[1].experts, (std::vector<int>{0, 2}));
  EXPECT_EQ(outputs[1].offsets, (Int64s{0, 2, 5}));
  EXPECT_EQ(values_of<float>(outputs[1].values), (Floats{1, 11, 1, 3, 3}));
  const auto out =
      combine(problem, {bytes_of(Floats{300, 400}), bytes_of(Floats{100, 200, 500, 600, 700})},
              DType::kFloat32);
  EXPECT_EQ(values_of<float>(out[0]), (Floats{175, 600, 387.5F}));
  EXPECT_EQ(values_of<float>(out[1]), (Floats{500}));
}

TEST(Oracle, RankWithoutExpertsReceivesNothing) {
  for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
    Problem problem = two_ranks(layout);
    problem.expert_owners = {1, 1, 1};
    const std::vector<RankOutput> outputs = dispatch(problem);
    EXPECT_TRUE(outputs[0].experts.empty());
    EXPECT_TRUE(outputs[0].counts.empty());
    EXPECT_EQ(outputs[0].offsets, (Int64s{0}));
    EXPECT_EQ(outputs[0].num_rows, 0);
    EXPECT_EQ(outputs[1].counts, (Int32s{2, 2, 3}));
  }
}

TEST(Oracle, NoTokensAnywhere) {
  Problem problem = two_ranks(Layout::kPadded);
  problem.ranks = {RankInput{}, RankInput{}};
  const std::vector<RankOutput> outputs = dispatch(problem);
  EXPECT_EQ(outputs[0].counts, (Int32s{0, 0}));
  EXPECT_EQ(outputs[0].offsets, (Int64s{0, 6, 12}));
  EXPECT_EQ(outputs[0].source_tokens, Int32s(12, -1));
  const auto out = combine(problem, {bytes_of(Floats(12)), bytes_of(Floats(6))}, DType::kFloat32);
  EXPECT_TRUE(out[0].empty());
  EXPECT_TRUE(out[1].empty());
}

TEST(Oracle, CapacityCountsTheRowsOfTheFullestRank) {
  EXPECT_FALSE(exceeds_capacity(two_ranks(Layout::kPadded), Placement::kPacked, 12));
  EXPECT_TRUE(exceeds_capacity(two_ranks(Layout::kPadded), Placement::kPacked, 11));
  EXPECT_FALSE(exceeds_capacity(two_ranks(Layout::kPacked), Placement::kPacked, 4));
  EXPECT_TRUE(exceeds_capacity(two_ranks(Layout::kPacked), Placement::kPacked, 3));
  EXPECT_FALSE(exceeds_capacity(two_ranks(Layout::kPacked, 4), Placement::kPacked, 8));
  EXPECT_TRUE(exceeds_capacity(two_ranks(Layout::kPacked, 4), Placement::kPacked, 7));
  EXPECT_FALSE(exceeds_capacity(two_ranks(Layout::kPacked), Placement::kSlotted, 4));
}

TEST(Oracle, RepeatedExpertsMayExceedWhatOneSourceOrOneExpertHolds) {
  // Expert 2 is alone on rank 1: M * min(K, 1) = 2 rows for each source, R * M = 4 in its padding.
  Problem problem = two_ranks(Layout::kPadded);
  problem.max_tokens = 2;
  problem.ranks = {rank_input(2, {1, 2}, {2, 2, 2, 2}, Floats(4)), RankInput{}};
  EXPECT_FALSE(exceeds_capacity(problem, Placement::kPacked, 8));
  EXPECT_TRUE(exceeds_capacity(problem, Placement::kSlotted, 8));
  problem.ranks[1] = problem.ranks[0];  // eight rows for one expert
  EXPECT_TRUE(exceeds_capacity(problem, Placement::kPacked, 8));
  EXPECT_THROW(dispatch(problem), std::invalid_argument);
  problem.layout = Layout::kPacked;
  EXPECT_FALSE(exceeds_capacity(problem, Placement::kPacked, 8));
  EXPECT_TRUE(exceeds_capacity(problem, Placement::kPacked, 7));
}

TEST(Oracle, RefusesProblemsThatDoNotFitTogether) {
  const auto refuses = [](auto&& change) {
    Problem problem = two_ranks(Layout::kPacked);
    change(problem);
    EXPECT_THROW(dispatch(problem), std::invalid_argument);
  };
  refuses([](Problem& problem) { problem.ranks.pop_back(); });
  refuses([](Problem& problem) { problem.expert_owners = {0}; });
  refuses([](Problem& problem) { problem.row_alignment = 0; });
  refuses([](Problem& problem) { problem.format = Format::kBFloat16; });
  refuses([](Problem& problem) { problem.max_tokens = 2; });
  refuses([](Problem& problem) { problem.ranks[0].topk_idx.pop_back(); });
  refuses([](Problem& problem) { problem.ranks[0].topk_idx[0] = 3; });
  refuses([](Problem& problem) { problem.ranks[0].x.pop_back(); });
  const Problem problem = two_ranks(Layout::kPacked);
  EXPECT_THROW(combine(problem, {}, DType::kFloat32), std::invalid_argument);
  EXPECT_THROW(combine(problem, {{}, {}}, DType::kFloat32), std::invalid_argument);
}

}  // namespace
}  // namespace tandem::reference
