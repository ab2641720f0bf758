#include "core/routing_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tandem::core {
namespace {

template <typename Index>
struct Planned {
  explicit Planned(std::vector<Index> indices, int topk, int num_experts)
      : selections(indices.size()), counts(num_experts) {
    const auto tokens = static_cast<std::int64_t>(indices.size()) / topk;
    bad = assign_slots(view_of(indices.data(), {tokens, topk}), selections, counts);
  }
  [[nodiscard]] std::vector<int> slots() const {
    std::vector<int> result;
    for (const Selection& selection : selections) {
      result.push_back(selection.expert < 0 ? -1 : selection.slot);
    }
    return result;
  }
  std::vector<Selection> selections;
  std::vector<std::int32_t> counts;
  std::int64_t bad;
};

TEST(RoutingPlan, SlotsCountEarlierSelectionsOfTheSameExpert) {
  const Planned<std::int64_t> plan({1, 0, 1, 2, 0, 1}, 2, 3);
  EXPECT_EQ(plan.bad, -1);
  EXPECT_EQ(plan.slots(), (std::vector{0, 0, 1, 0, 1, 2}));
  EXPECT_EQ(plan.counts, (std::vector<std::int32_t>{2, 3, 1}));
}

TEST(RoutingPlan, NegativeSelectsNothing) {
  const Planned<std::int32_t> plan({-1, 0, -7, 0}, 2, 1);
  EXPECT_EQ(plan.slots(), (std::vector{-1, 0, -1, 1}));
  EXPECT_EQ(plan.counts, (std::vector<std::int32_t>{2}));
}

TEST(RoutingPlan, ARepeatedExpertTakesTwoSlots) {
  const Planned<std::int64_t> plan({3, 3}, 2, 4);
  EXPECT_EQ(plan.slots(), (std::vector{0, 1}));
}

TEST(RoutingPlan, NamesTheFirstIndexBeyondTheExperts) {
  EXPECT_EQ(Planned<std::int64_t>({0, 1, 5, 9}, 2, 5).bad, 2);
  EXPECT_EQ(Planned<std::int32_t>({4, 5}, 1, 5).bad, 1);
  EXPECT_EQ(Planned<std::int64_t>({std::int64_t{1} << 32}, 1, 5).bad, 0);  // not truncated
}

TEST(RoutingPlan, NoTokensLeaveCountsAtZero) {
  const Planned<std::int64_t> plan({}, 4, 2);
  EXPECT_EQ(plan.counts, (std::vector<std::int32_t>{0, 0}));
}

}  // namespace
}  // namespace tandem::core
