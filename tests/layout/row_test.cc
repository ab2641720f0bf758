// The bytes of a row: parts, paddings, pitches.
#include "layout/row.h"

#include <gtest/gtest.h>

namespace tandem::layout {
namespace {

constexpr Format kFormats[] = {Format::kBFloat16, Format::kFloat16, Format::kFloat32,
                               Format::kFp8,      Format::kFp8Pow2, Format::kFp8Ue8m0};

TEST(Row, PitchIsAMultipleOfSixteenAndHoldsBothParts) {
  for (const Format format : kFormats) {
    for (int hidden = 1; hidden <= 1100; ++hidden) {
      const RowShape row{hidden, format};
      ASSERT_EQ(row.pitch() % 16, 0);
      ASSERT_EQ(row.scales_offset() % 16, 0);
      ASSERT_GE(row.scales_offset(), row.value_bytes());
      ASSERT_GE(row.pitch(), row.scales_offset() + 4 * row.num_scales());
      ASSERT_LT(row.pitch(), row.value_bytes() + 4 * row.num_scales() + 32);
    }
  }
}

TEST(Row, LastFp8GroupMayBeShort) {
  EXPECT_EQ(num_fp8_groups(1), 1);
  EXPECT_EQ(num_fp8_groups(128), 1);
  EXPECT_EQ(num_fp8_groups(129), 2);
  EXPECT_EQ(num_fp8_groups(kMaxHidden), 512);
}

TEST(Row, ScalesAreFloatsOrFourBytesToAWord) {
  EXPECT_EQ((RowShape{1000, Format::kFp8}.num_scales()), 8);
  EXPECT_EQ((RowShape{1000, Format::kFp8Pow2}.num_scales()), 8);
  EXPECT_EQ((RowShape{1000, Format::kFp8Ue8m0}.num_scales()), 2);
  EXPECT_EQ((RowShape{1025, Format::kFp8Ue8m0}.num_scales()), 3);
  EXPECT_EQ((RowShape{1000, Format::kBFloat16}.num_scales()), 0);
}

TEST(Row, WidestPitchCoversEveryAllowedFormat) {
  for (const Format widest :
       {Format::kBFloat16, Format::kFloat16, Format::kFloat32, Format::kFp8}) {
    for (const int max_hidden : {1, 2, 5, 8, 9, 100, 129, 1000, 7168, kMaxHidden}) {
      const std::int64_t most = max_dispatch_pitch(max_hidden, widest);
      for (const Format format : kFormats) {
        const bool wider = size_of(value_dtype(format)) > size_of(value_dtype(widest));
        if (wider && !is_fp8(format)) continue;
        for (int hidden = max_hidden; hidden >= 1; hidden = hidden * 2 / 3) {
          EXPECT_LE((RowShape{hidden, format}.pitch()), most)
              << "hidden " << hidden << " of " << max_hidden;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::layout
