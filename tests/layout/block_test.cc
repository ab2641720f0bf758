// The block: regions and words never overlap, lie inside, and depend on capacities alone, in 64
// bits.
#include "layout/block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tandem::layout {
namespace {

Capacity some_capacity() {
  return {.num_ranks = 3,
          .num_experts = 5,
          .max_local_experts = 2,
          .max_tokens = 4,
          .max_topk = 2,
          .num_arrival_words = 4,
          .dispatch_pitch = 144,
          .combine_pitch = 80,
          .rows = 23,
          .view_rows = 23,
          .landing_rows = 24,
          .combine_rows = 23};
}

using Range = std::pair<std::int64_t, std::int64_t>;

// Everything that has a place, as [begin, end).
std::vector<Range> all_ranges(const Block& block) {
  const Capacity& capacity = block.capacity();
  std::vector<Range> ranges;
  const auto add_word = [&](std::int64_t offset) { ranges.emplace_back(offset, offset + 8); };
  for (int parity = 0; parity < 2; ++parity) {
    for (int source = 0; source < capacity.num_ranks; ++source) {
      add_word(block.header(parity, source));
      for (int which = 0; which < kNumArguments; ++which) {
        add_word(block.argument(parity, source, static_cast<Argument>(which)));
      }
      for (int index = 0; index < capacity.num_arrival_words; ++index) {
        add_word(block.arrived(parity, source, index));
      }
      for (int expert = 0; expert < capacity.num_experts; ++expert) {
        add_word(block.count(parity, source, expert));
      }
    }
  }
  for (int source = 0; source < capacity.num_ranks; ++source) add_word(block.completed(source));
  add_word(block.doorbell());
  for (int rank = 0; rank < capacity.num_ranks; ++rank) add_word(block.roster(rank));
  add_word(block.stop());
  add_word(block.at_work());
  for (int half = 0; half < kNumHalves; ++half) {
    const auto add = [&](std::int64_t begin, std::int64_t bytes) {
      if (bytes > 0) ranges.emplace_back(begin, begin + bytes);
    };
    add(block.view_sources(half), 4 * capacity.view_rows);
    add(block.view_rows(half), capacity.view_rows * capacity.dispatch_pitch);
    add(block.combine_rows(half), capacity.combine_rows * capacity.combine_pitch);
    add(block.landing_sources(half), 4 * capacity.landing_rows);
    add(block.landing_rows(half), capacity.landing_rows * capacity.dispatch_pitch);
  }
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

void expect_disjoint_and_inside(const Capacity& capacity) {
  const Block block(capacity);
  const std::vector<Range> ranges = all_ranges(block);
  EXPECT_GE(ranges.front().first, 0);
  EXPECT_LE(ranges.back().second, block.size_bytes());
  for (std::size_t index = 0; index + 1 < ranges.size(); ++index) {
    ASSERT_LE(ranges[index].second, ranges[index + 1].first) << "range " << index;
  }
}

TEST(Block, NothingOverlapsAndAllLiesInside) {
  for (const int ranks : {1, 2, 3, 8, 1024}) {
    for (const int experts : {1, 5, 288}) {
      for (const std::int64_t rows : {0, 1, 31, 32, 33, 1000}) {
        Capacity capacity = some_capacity();
        capacity.num_ranks = ranks;
        capacity.num_experts = ranks == 1024 ? 3 : experts;
        capacity.view_rows = rows;
        capacity.combine_rows = rows / 2;
        capacity.landing_rows = 2 * rows;
        expect_disjoint_and_inside(capacity);
      }
    }
  }
}

TEST(Block, RegionsStartOnPagesAndRowsOnCacheLines) {
  const Block block(some_capacity());
  for (int half = 0; half < kNumHalves; ++half) {
    EXPECT_EQ(block.view_sources(half) % kRegionAlignment, 0);
    EXPECT_EQ(block.combine_rows(half) % kRegionAlignment, 0);
    EXPECT_EQ(block.landing_sources(half) % kRegionAlignment, 0);
    EXPECT_EQ(block.view_rows(half) % kControlAlignment, 0);
    EXPECT_EQ(block.landing_rows(half) % kControlAlignment, 0);
  }
  EXPECT_EQ(block.size_bytes() % kRegionAlignment, 0);
}

TEST(Block, ExcludedRegionsTakeNoBytes) {
  Capacity capacity = some_capacity();
  capacity.view_rows = capacity.landing_rows = capacity.combine_rows = 0;
  const Block block(capacity);
  EXPECT_EQ(block.size_bytes(), round_up(block.control_bytes(), kRegionAlignment));
}

// Report: a cliff at 2^31.
TEST(Block, SizesBeyondFourGigabytesAreExact) {
  Capacity capacity = some_capacity();
  capacity.dispatch_pitch = capacity.combine_pitch = 262'144;
  capacity.view_rows = capacity.combine_rows = capacity.landing_rows = 2'000'000'000;
  const Block block(capacity);
  const std::int64_t rows_bytes = std::int64_t{2'000'000'000} * 262'144;
  EXPECT_GT(block.size_bytes(), 6 * rows_bytes);
  EXPECT_LT(block.size_bytes(), 6 * rows_bytes + (std::int64_t{1} << 36));
  expect_disjoint_and_inside(capacity);
}

TEST(Block, WordsOfDifferentKindsShareNoCacheLine) {
  const Block block(some_capacity());
  const std::int64_t kinds[] = {block.header(0, 0),     block.argument(0, 0, Argument::kMaxTokens),
                                block.arrived(0, 0, 0), block.completed(0),
                                block.count(0, 0, 0),   block.doorbell()};
  for (const std::int64_t first : kinds) EXPECT_EQ(first % kControlAlignment, 0);
}

}  // namespace
}  // namespace tandem::layout
