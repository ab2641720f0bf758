#include "bench/routing.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace tandem::tools {
namespace {

TEST(BenchRouting, TokensSelectDistinctExperts) {
  for (const BenchRouting routing : {BenchRouting::kUniform, BenchRouting::kHot}) {
    const BenchCase work{.ranks = 3, .tokens = 50, .topk = 5, .experts = 9, .routing = routing};
    const auto selections = make_routing(work, {}, 1);
    ASSERT_EQ(selections.size(), 3U);
    for (const std::vector<std::int64_t>& of_rank : selections) {
      ASSERT_EQ(of_rank.size(), 250U);
      for (std::size_t first = 0; first < of_rank.size(); first += 5) {
        const std::set<std::int64_t> chosen(
            of_rank.begin() + static_cast<std::ptrdiff_t>(first),
            of_rank.begin() + static_cast<std::ptrdiff_t>(first) + 5);
        EXPECT_EQ(chosen.size(), 5U);
        EXPECT_GE(*chosen.begin(), 0);
        EXPECT_LT(*chosen.rbegin(), 9);
        if (routing == BenchRouting::kHot) {
          EXPECT_EQ(of_rank[first], 0);
        }
      }
    }
  }
}

TEST(BenchRouting, RowsOfExpertsCountEverySelection) {
  const BenchCase work{.ranks = 2, .tokens = 64, .routing = BenchRouting::kHot};
  const std::vector<std::int64_t> rows = rows_of_experts(work, make_routing(work, {}, 1));
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), 2 * 64 * 8);
  EXPECT_EQ(rows[0], 2 * 64);
}

TEST(BenchRouting, RanksTakeARecordedRoutingInTurnAndStartAgainAtItsEnd) {
  const BenchCase work{
      .ranks = 2, .tokens = 2, .topk = 2, .experts = 4, .routing = BenchRouting::kReal};
  const RecordedRouting recorded{.experts = 4, .topk = 2, .topk_idx = {0, 1, 2, 3, 1, 2}};
  const auto selections = make_routing(work, recorded, 1);
  EXPECT_EQ(selections[0], (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(selections[1], (std::vector<std::int64_t>{1, 2, 0, 1}));
}

TEST(BenchRouting, LayerFileHoldsFourLayersOfEightThousandTokens) {
  const RecordedRouting recorded = read_routing(TANDEM_LAYER_FILE);
  EXPECT_EQ(recorded.experts, 32);
  EXPECT_EQ(recorded.topk, 4);
  EXPECT_EQ(recorded.topk_idx.size(), 4U * 8192 * 4);
}

}  // namespace
}  // namespace tandem::tools
