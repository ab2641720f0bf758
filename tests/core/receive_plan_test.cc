// Hand-computed rows for two ranks with two experts each, and the verdicts on what does not fit.
#include "core/receive_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace tandem::core {
namespace {

struct Plan {
  Plan(const std::vector<std::int32_t>& matrix, const ExpertMap& experts, const ReceiveShape& shape,
       int rank)
      : begin(experts.num_experts()),
        counts(experts.num_local(rank)),
        offsets(experts.num_local(rank) + 1),
        ranges(experts.num_local(rank) * experts.num_ranks()) {
    excess = plan_rows(matrix, experts, shape, rank, begin, {counts, offsets, ranges});
  }
  std::vector<std::int64_t> begin;
  std::vector<std::int32_t> counts;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> ranges;
  std::optional<Excess> excess;
};

// Rank 0 sends 1, 0, 2, 3 rows to experts 0..3; rank 1 sends 4, 1, 0, 1.
const std::vector<std::int32_t> kMatrix{1, 0, 2, 3, 4, 1, 0, 1};
const ExpertMap kExperts = ExpertMap::contiguous(4, 2);

TEST(ReceivePlan, PaddedExpertsStartAtMultiplesOfRanksTimesMaxTokens) {
  const Plan plan(kMatrix, kExperts, {.max_tokens = 8, .topk = 4, .capacity_rows = 32}, 1);
  ASSERT_FALSE(plan.excess);
  EXPECT_EQ(plan.counts, (std::vector<std::int32_t>{2, 4}));
  EXPECT_EQ(plan.offsets, (std::vector<std::int64_t>{0, 16, 32}));
  EXPECT_EQ(plan.ranges,
            (std::vector{make_range(0, 2), make_range(2, 0), make_range(0, 3), make_range(3, 1)}));
  // Rank 1's rows come behind rank 0's at every owner.
  EXPECT_EQ(plan.begin, (std::vector<std::int64_t>{1, 16, 2, 19}));
}

TEST(ReceivePlan, PackedExpertsFollowEachOtherAligned) {
  const ReceiveShape shape{.layout = Layout::kPacked,
                           .max_tokens = 8,
                           .topk = 4,
                           .row_alignment = 4,
                           .capacity_rows = 12};
  const Plan plan(kMatrix, kExperts, shape, 0);
  ASSERT_FALSE(plan.excess);
  EXPECT_EQ(plan.counts, (std::vector<std::int32_t>{5, 1}));
  EXPECT_EQ(plan.offsets, (std::vector<std::int64_t>{0, 8, 12}));
  EXPECT_EQ(plan.begin, (std::vector<std::int64_t>{0, 8, 0, 4}));
}

TEST(ReceivePlan, EveryRankNamesTheSameRankThatWouldOverflow) {
  const ReceiveShape shape{
      .layout = Layout::kPacked, .max_tokens = 8, .topk = 4, .capacity_rows = 5};
  for (const int rank : {0, 1}) {
    const Plan plan(kMatrix, kExperts, shape, rank);
    ASSERT_TRUE(plan.excess);
    EXPECT_EQ(plan.excess->rank, 0);
    EXPECT_EQ(plan.excess->rows, 6);
    EXPECT_EQ(plan.excess->limit, 5);
  }
}

TEST(ReceivePlan, PaddedRefusesAnExpertWithMoreThanItsPadding) {
  const Plan plan(kMatrix, kExperts, {.max_tokens = 2, .topk = 4, .capacity_rows = 64}, 1);
  ASSERT_TRUE(plan.excess);
  EXPECT_EQ(plan.excess->expert, 0);
  EXPECT_EQ(plan.excess->rows, 5);
  EXPECT_EQ(plan.excess->limit, 4);
}

TEST(ReceivePlan, RankWithoutExpertsReceivesNothing) {
  const ExpertMap experts = ExpertMap::from_owners(std::vector{0, 0, 0, 0}, 2);
  const Plan plan(kMatrix, experts,
                  {.layout = Layout::kPacked, .max_tokens = 8, .topk = 4, .capacity_rows = 32}, 1);
  ASSERT_FALSE(plan.excess);
  EXPECT_EQ(plan.offsets, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(plan.begin, (std::vector<std::int64_t>{1, 5, 8, 11}));
}

TEST(LandingPlan, ASourcesRowsLieByExpertBehindThoseOfLowerSources) {
  const ReceiveShape shape{.max_tokens = 4, .topk = 2};
  std::vector<std::int64_t> begin(4);
  ASSERT_FALSE(plan_landing(std::vector<std::int32_t>{3, 1, 2, 0}, kExperts, shape, 1, begin));
  EXPECT_EQ(begin, (std::vector<std::int64_t>{8, 11, 8, 10}));
}

TEST(LandingPlan, RefusesMoreRowsThanASourceMayHaveForARank) {
  const ReceiveShape shape{.max_tokens = 4, .topk = 2};
  std::vector<std::int64_t> begin(4);
  const auto excess =
      plan_landing(std::vector<std::int32_t>{0, 0, 5, 4}, kExperts, shape, 1, begin);
  ASSERT_TRUE(excess);
  EXPECT_EQ(excess->rank, 1);
  EXPECT_EQ(excess->source, 1);
  EXPECT_EQ(excess->rows, 9);
  EXPECT_EQ(excess->limit, 8);
}

}  // namespace
}  // namespace tandem::core
