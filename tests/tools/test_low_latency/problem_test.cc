#include "test_low_latency/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace tandem::tools {
namespace {

Shape small_shape() {
  return {.ranks = 5, .tokens = 9, .hidden = 40, .topk = 4, .experts = 12, .masked = 3};
}

TEST(TokenCounts, EvenIsTheSameEverywhere) {
  EXPECT_EQ(token_counts(small_shape(), 1), std::vector<int>(5, 9));
}

TEST(TokenCounts, UnevenHasARankWithNoneAndOneWithAll) {
  Shape shape = small_shape();
  shape.uneven = true;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::vector<int> counts = token_counts(shape, seed);
    EXPECT_EQ(*std::min_element(counts.begin(), counts.end()), 0);
    EXPECT_EQ(*std::max_element(counts.begin(), counts.end()), 9);
  }
}

TEST(ExpertOwners, EvenLeavesTheMapToTheLibrary) {
  EXPECT_TRUE(expert_owners(small_shape()).empty());
}

TEST(ExpertOwners, UnevenLeavesTheLastOfManyRanksWithoutExperts) {
  Shape shape = small_shape();
  shape.uneven = true;
  shape.experts = 200;
  const std::vector<int> owners = expert_owners(shape);
  ASSERT_EQ(owners.size(), 200U);
  EXPECT_EQ(std::count(owners.begin(), owners.end(), 4), 0);
  EXPECT_GT(std::count(owners.begin(), owners.end(), 3),
            std::count(owners.begin(), owners.end(), 0));
  EXPECT_GT(std::count(owners.begin(), owners.end(), 0), 0);
  EXPECT_FALSE(std::is_sorted(owners.begin(), owners.end()));
}

TEST(RandomSelections, MasksExactlyAsManyAsAsked) {
  const Shape shape = small_shape();
  const auto selections = random_selections(shape, 9, 1, 0);
  ASSERT_EQ(selections.size(), 36U);
  EXPECT_EQ(std::count(selections.begin(), selections.end(), -1), 3);
}

TEST(RandomSelections, MaskMayCoverAll) {
  Shape shape = small_shape();
  shape.masked = 1000;
  const auto selections = random_selections(shape, 2, 1, 0);
  EXPECT_EQ(selections, std::vector<std::int64_t>(8, -1));
  EXPECT_TRUE(random_selections(shape, 0, 1, 0).empty());
}

TEST(RandomSelections, NoTokenNamesAnExpertTwice) {
  Shape shape = small_shape();
  shape.masked = 0;
  shape.topk = 12;
  const auto selections = random_selections(shape, 9, 1, 2);
  for (std::size_t token = 0; token < 9; ++token) {
    const std::set<std::int64_t> experts(selections.begin() + static_cast<long>(token * 12),
                                         selections.begin() + static_cast<long>(token * 12 + 12));
    EXPECT_EQ(experts.size(), 12U);
    EXPECT_EQ(*experts.begin(), 0);
    EXPECT_EQ(*experts.rbegin(), 11);
  }
}

TEST(RandomSelections, TopkBeyondTheExpertsIsLeftOpen) {
  Shape shape = small_shape();
  shape.masked = 0;
  shape.experts = 3;
  const auto selections = random_selections(shape, 9, 1, 2);
  EXPECT_EQ(std::count(selections.begin(), selections.end(), -1), 9);
}

TEST(MakeProblem, DependsOnSeedAndRankAndNothingElse) {
  const auto a = make_problem(small_shape(), 1, Format::kBFloat16);
  const auto b = make_problem(small_shape(), 1, Format::kBFloat16);
  const auto c = make_problem(small_shape(), 2, Format::kBFloat16);
  EXPECT_EQ(a.ranks[0].x, b.ranks[0].x);
  EXPECT_EQ(a.ranks[3].topk_idx, b.ranks[3].topk_idx);
  EXPECT_NE(a.ranks[0].x, c.ranks[0].x);
  EXPECT_NE(a.ranks[0].topk_idx, c.ranks[0].topk_idx);
  EXPECT_NE(a.ranks[0].topk_weights, c.ranks[0].topk_weights);
  EXPECT_NE(a.ranks[0].x, a.ranks[1].x);
}

TEST(MakeProblem, RoutingIsTheSameForAllFormats) {
  const auto a = make_problem(small_shape(), 1, Format::kBFloat16);
  const auto b = make_problem(small_shape(), 1, Format::kFloat32);
  EXPECT_EQ(a.ranks[2].topk_idx, b.ranks[2].topk_idx);
  EXPECT_EQ(b.ranks[2].x.size(), 9U * 40 * 4);
}

TEST(MakeProblem, WithoutTokensStillHasRoomForOne) {
  Shape shape = small_shape();
  shape.tokens = 0;
  const auto problem = make_problem(shape, 1, Format::kFp8);
  EXPECT_EQ(problem.max_tokens, 1);
  EXPECT_EQ(problem.ranks[0].num_tokens, 0);
}

}  // namespace
}  // namespace tandem::tools
