// Lists and rows of a parcel lie apart, and within it.
#include "layout/parcel.h"

#include <gtest/gtest.h>

namespace tandem::layout {
namespace {

TEST(Parcel, AllRowsAndTheLongestListHaveRoom) {
  for (const std::int32_t tokens : {1, 7, 128}) {
    for (const std::int32_t topk : {1, 8, 64}) {
      const Parcel parcel({.max_tokens = tokens, .max_topk = topk, .dispatch_pitch = 112});
      EXPECT_LE(Parcel::list_bytes(tokens, topk, true), parcel.rows());
      EXPECT_LE(parcel.rows() + tokens * 112, parcel.size_bytes());
      EXPECT_EQ(parcel.rows() % kControlAlignment, 0);
      EXPECT_EQ(parcel.size_bytes() % kControlAlignment, 0);
    }
  }
}

// Frozen: what ranks of one build send each other.
TEST(Parcel, AnEntryIsATokenItsExpertsAndWeightsBehindTheNumberOfRowsAndTheFirstPart) {
  static_assert(Parcel::entry(0, 8, false) == 2 && Parcel::entry(2, 8, false) == 20);
  static_assert(Parcel::entry(0, 8, true) == 2 && Parcel::entry(2, 8, true) == 36);
  static_assert(Parcel::list_bytes(0, 8, false) == 8 && Parcel::list_bytes(3, 8, false) == 116);
  static_assert(Parcel::list_bytes(3, 8, true) == 212);
  constexpr Parcel kParcel({.max_tokens = 4, .max_topk = 8, .dispatch_pitch = 32});
  static_assert(kParcel.rows() == 384 && kParcel.size_bytes() == 512);
}

}  // namespace
}  // namespace tandem::layout
