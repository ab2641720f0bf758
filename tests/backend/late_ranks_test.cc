// For whom a rank's kernels wait, as their notes add up.
#include "backend/cuda/late_ranks.h"

#include <gtest/gtest.h>

#include "backend/cuda/state_view.h"

namespace tandem::cuda {
namespace {

using namespace std::chrono_literals;

constexpr layout::Epoch kEpoch = 0xffffffffU;  // the next one is 0

layout::Word note(layout::Epoch epoch) {
  return wait_note(epoch, static_cast<std::uint32_t>(Operation::kDispatch),
                   static_cast<std::uint32_t>(Phase::kRows));
}

TEST(LateRanks, WaitLastsAsLongAsItIsNoted) {
  LateRanks late(3, 10ms);
  const LateRanks::Time begin{1s};
  EXPECT_EQ(late.first(), -1);
  late.take(2, note(kEpoch), begin);
  EXPECT_EQ(late.first(), 2);
  ASSERT_TRUE(late.of(2));
  EXPECT_EQ(late.of(2)->epoch, kEpoch);
  EXPECT_EQ(late.of(2)->operation, Operation::kDispatch);
  EXPECT_EQ(late.of(2)->phase, Phase::kRows);
  EXPECT_EQ(late.of(2)->since, begin - 10ms);  // it noted nothing before an interval was over
  late.take(2, 0, begin + 9ms);
  late.take(2, note(kEpoch), begin + 20ms);
  late.take(2, 0, begin + 50ms);
  ASSERT_TRUE(late.of(2));
  EXPECT_EQ(late.of(2)->since, begin - 10ms);
  EXPECT_EQ(late.of(2)->last, begin + 20ms);
  late.take(2, 0, begin + 51ms);
  EXPECT_FALSE(late.of(2));
  EXPECT_EQ(late.first(), -1);
}

// A thread that did not get to run has missed notes, not the end of the wait.
TEST(LateRanks, WaitIsTheSameAfterALookThatCameLate) {
  LateRanks late(1, 10ms);
  const LateRanks::Time begin{1s};
  late.take(0, note(kEpoch), begin);
  late.take(0, note(kEpoch), begin + 5s);
  EXPECT_EQ(late.of(0)->since, begin - 10ms);
}

TEST(LateRanks, NextOperationWaitsAnew) {
  LateRanks late(1, 10ms);
  const LateRanks::Time begin{1s};
  late.take(0, note(kEpoch), begin);
  late.take(0, note(kEpoch + 1), begin + 15ms);
  EXPECT_EQ(late.of(0)->since, begin + 5ms);
  EXPECT_EQ(late.of(0)->epoch, 0U);
  late.take(0, note(kEpoch + 1), begin + 20ms);
  late.forget(0);
  EXPECT_FALSE(late.of(0));
  late.take(0, note(kEpoch + 1), begin + 30ms);
  EXPECT_EQ(late.of(0)->since, begin + 20ms);
  late.forget();
  EXPECT_FALSE(late.of(0));
}

// Until when a wait lasts by another set of ranks says nothing of who is late now.
TEST(LateRanks, WaitsBeginAnewWhenWhoTakesPartHasChanged) {
  LateRanks late(2, 10ms);
  const LateRanks::Time begin{1s};
  late.take(1, note(kEpoch), begin);
  late.spare(1);
  late.take(1, note(kEpoch), begin + 15ms);
  EXPECT_TRUE(late.of(1)->spared);
  late.restart(begin + 20ms);
  EXPECT_FALSE(late.of(0));
  EXPECT_EQ(late.of(1)->since, begin + 20ms);
  EXPECT_EQ(late.of(1)->last, begin + 15ms);
  EXPECT_FALSE(late.of(1)->spared);
}

}  // namespace
}  // namespace tandem::cuda
