// What hosts make of a view for kernels: roster words of ranks that come and go, and who hears of
// which operation, also around the wrap of epochs and long after a change.
#include "backend/cuda/roster_words.h"

#include <gtest/gtest.h>

namespace tandem::cuda {
namespace {

using layout::Epoch;
using runtime::View;

constexpr int kNumRanks = 3;

View view_of(std::vector<bool> active, std::vector<Epoch> from) {
  return {
      .active = std::move(active), .from = std::move(from), .lost = std::vector<bool>(kNumRanks)};
}

TEST(RosterWords, SayFromWhichOperationOnARankTakesPart) {
  for (const Epoch first : {Epoch{100}, Epoch{0xffffffff}, Epoch{0}}) {
    const View view = view_of({true, false, true}, {first, first, first - 50});
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const layout::Word word = word_from(view, rank, first);
      EXPECT_EQ(word, pending_word(view, rank));
      EXPECT_EQ(layout::takes_part(word, first), view.active[rank]);
    }
    EXPECT_FALSE(layout::takes_part(pending_word(view, 0), first - 1));
    EXPECT_TRUE(layout::takes_part(pending_word(view, 1), first - 1));
  }
}

// Half of all epochs later its own epoch would say the opposite.
TEST(RosterWords, OfLongAgoHoldAtOnce) {
  constexpr Epoch kHalf = Epoch{1} << 31;
  const View view = view_of({true, false, true}, {7, 7, 7});
  for (const Epoch first : {Epoch{7} + 200, kHalf + 5, kHalf + 100, Epoch{7} - 200}) {
    EXPECT_TRUE(layout::takes_part(word_from(view, 0, first), first));
    EXPECT_FALSE(layout::takes_part(word_from(view, 1, first), first));
  }
}

TEST(RosterWords, TellThatARankIsLost) {
  View view = view_of({true, false, true}, {7, 7, 7});
  view.lost[1] = true;
  EXPECT_NE(layout::value_of(pending_word(view, 1)) & layout::kRosterLost, 0U);
  EXPECT_EQ(layout::value_of(pending_word(view, 0)) & layout::kRosterLost, 0U);
}

TEST(Audience, ChangesWithTheOperationFromWhichAViewHolds) {
  Audience audience(kNumRanks);
  const Epoch first = 0xfffffffe;
  const View all = view_of({true, true, true}, {first, first, first});
  EXPECT_TRUE(audience.takes_part(all, 1, first));
  const View masked = view_of({true, false, true}, {first, first + 4, first});
  for (Epoch epoch = first; epoch != first + 8; ++epoch) {
    EXPECT_EQ(audience.takes_part(masked, 1, epoch), !layout::has_reached(epoch, first + 4));
    EXPECT_TRUE(audience.takes_part(masked, 2, epoch));
  }
  const View back = view_of({true, true, true}, {first, first + 12, first});
  for (Epoch epoch = first + 8; epoch != first + 16; ++epoch) {
    EXPECT_EQ(audience.takes_part(back, 1, epoch), layout::has_reached(epoch, first + 12));
  }
}

// In steps that are short beside all epochs, as operations are.
TEST(Audience, KnowsAfterAnyNumberOfOperations) {
  Audience audience(kNumRanks);
  const View view = view_of({true, false, true}, {7, 9, 7});
  Epoch epoch = 9;
  for (int step = 0; step < 64; ++step, epoch += 0x0fffffff) {
    EXPECT_TRUE(audience.takes_part(view, 0, epoch));
    EXPECT_FALSE(audience.takes_part(view, 1, epoch));
  }
}

// Also of the operation in which it was missed.
TEST(Audience, LosesARankThatOthersHaveMissed) {
  Audience audience(kNumRanks);
  EXPECT_TRUE(audience.takes_part(view_of({true, true, true}, {1, 1, 1}), 1, 20));
  View lost = view_of({true, false, true}, {1, 21, 1});
  lost.lost[1] = true;
  EXPECT_FALSE(audience.takes_part(lost, 1, 20));
  EXPECT_FALSE(audience.takes_part(lost, 1, 21));
  EXPECT_TRUE(audience.takes_part(lost, 2, 20));
  const View back = view_of({true, true, true}, {1, 30, 1});
  EXPECT_FALSE(audience.takes_part(back, 1, 29));
  EXPECT_TRUE(audience.takes_part(back, 1, 30));
}

// Left behind by a new start, in the past of all.
TEST(Audience, LosesAtOnceWhoeverIsLeftBehind) {
  Audience audience(kNumRanks);
  EXPECT_TRUE(audience.takes_part(view_of({true, true, true}, {1, 1, 1}), 1, 20));
  EXPECT_FALSE(audience.takes_part(view_of({true, false, true}, {25, 14, 25}), 1, 25));
}

}  // namespace
}  // namespace tandem::cuda
