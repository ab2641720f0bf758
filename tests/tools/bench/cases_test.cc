#include "bench/cases.h"

#include <gtest/gtest.h>

namespace tandem::tools {
namespace {

// Worked out by hand: 2 ranks of 128 tokens send 2048 rows of 14336 bytes.
TEST(BenchCases, BytesOfAPackedZeroCopyPair) {
  const BenchCase work;
  const BenchBytes bytes = bytes_moved(work, 2048);
  EXPECT_EQ(bytes.dispatch, 256 * 14336 + 2048 * 14336);
  EXPECT_EQ(bytes.combine, 2048 * 14336 + 256 * 14336);
  EXPECT_EQ(bytes.pair(), bytes.dispatch + bytes.combine);
}

TEST(BenchCases, ScalesOfFp8TravelToo) {
  BenchCase work{.format = Format::kFp8};
  EXPECT_EQ(bytes_moved(work, 10).dispatch, 256 * 14336 + 10 * (7168 + 56 * 4));
  work.format = Format::kFp8Ue8m0;
  EXPECT_EQ(bytes_moved(work, 10).dispatch, 256 * 14336 + 10 * (7168 + 56));
  EXPECT_EQ(bytes_moved(work, 10).combine, (10 + 256) * 14336);
}

TEST(BenchCases, SlottedAndStagedRowsAreCopiedOnce) {
  const BenchCase work{.placement = Placement::kSlotted, .zero_copy = false};
  const BenchBytes bytes = bytes_moved(work, 10);
  EXPECT_EQ(bytes.dispatch, (256 + 3 * 10) * 14336);
  EXPECT_EQ(bytes.combine, (256 + 3 * 10) * 14336);
}

TEST(BenchCases, FloorIsBytesAtTheRateOfACopy) { EXPECT_DOUBLE_EQ(floor_us(4'000'000, 4000), 1.0); }

}  // namespace
}  // namespace tandem::tools
