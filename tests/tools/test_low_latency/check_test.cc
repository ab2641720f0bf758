// The checker passes what is right, and finds every kind of damage: the proof that "ok" means
// something.
#include "test_low_latency/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "tandem/numeric.h"
#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {
namespace {

constexpr int kRank = 1;
constexpr Format kFormat = Format::kFp8;

// What a rank received, on the host, by local expert.
struct Received {
  struct Rows {
    std::vector<std::int32_t> source_tokens;
    std::vector<std::byte> values;
    std::vector<std::byte> scales;
  };
  std::vector<std::int32_t> counts;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> ranges;
  std::vector<Rows> experts;
  std::vector<std::byte> combined;
};

class RoundCheckTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const Shape shape{.ranks = 3, .tokens = 8, .hidden = 200, .topk = 3, .experts = 7};
    scenario_ = new Scenario(make_scenario(shape, 1, {{.format = kFormat}}));
  }
  static void TearDownTestSuite() { delete scenario_; }

  static const Expectation& expectation() { return scenario_->expectations.at(kFormat); }
  static const Arrivals& arrivals() { return scenario_->arrivals.at(Layout::kPadded); }

  // What a faultless rank would have.
  static Received correct() {
    const reference::RankOutput output = reference::dispatch(expectation().problem)[kRank];
    Received received{
        output.counts, output.offsets, output.ranges, {}, expectation().combined[kRank]};
    const std::size_t scale_bytes = 4 * static_cast<std::size_t>(num_scales(kFormat, 200));
    for (std::size_t local = 0; local < output.counts.size(); ++local) {
      const auto first = static_cast<std::size_t>(output.offsets[local]);
      const std::size_t end = first + static_cast<std::size_t>(output.counts[local]);
      const auto cut = [&](const auto& all, std::size_t unit) {
        return std::decay_t<decltype(all)>(all.begin() + static_cast<long>(first * unit),
                                           all.begin() + static_cast<long>(end * unit));
      };
      received.experts.push_back(
          {cut(output.source_tokens, 1), cut(output.values, 200), cut(output.scales, scale_bytes)});
    }
    return received;
  }

  struct Verdict {
    Tally tally;
    std::uint64_t hash = 0;
    double max_abs_error = 0;
  };

  static Verdict judge(const Received& received) {
    Verdict verdict;
    RoundCheck check(expectation(), arrivals(), kRank, verdict.tally);
    check.metadata(received.counts, received.offsets, received.ranges);
    for (std::size_t local = 0; local < received.experts.size(); ++local) {
      const Received::Rows& rows = received.experts[local];
      check.rows(static_cast<int>(local), rows.source_tokens, rows.values, rows.scales);
    }
    check.combined(received.combined);
    verdict.hash = check.hash();
    verdict.max_abs_error = check.max_abs_error();
    return verdict;
  }

  // Damages a correct result; the checker must say `kind` and the hash must differ.
  static void expect_found(const std::string& kind, const std::function<void(Received&)>& damage) {
    Received received = correct();
    damage(received);
    const Verdict verdict = judge(received);
    EXPECT_FALSE(verdict.tally.passed());
    ASSERT_FALSE(verdict.tally.messages().empty());
    EXPECT_EQ(verdict.tally.messages()[0].substr(0, kind.size()), kind);
  }

  static inline const Scenario* scenario_ = nullptr;
};

TEST_F(RoundCheckTest, PassesWhatIsRight) {
  const Verdict verdict = judge(correct());
  EXPECT_TRUE(verdict.tally.passed());
  EXPECT_TRUE(verdict.tally.messages().empty());
  EXPECT_GT(verdict.tally.checks(), 20);
  EXPECT_EQ(verdict.max_abs_error, 0);
  EXPECT_EQ(verdict.hash, expectation().hashes[kRank]);
}

TEST_F(RoundCheckTest, FindsAWrongCount) {
  expect_found("counts: entry 1", [](Received& received) { ++received.counts[1]; });
}

TEST_F(RoundCheckTest, FindsAMissingCount) {
  expect_found("counts: 1 entries", [](Received& received) { received.counts.resize(1); });
}

TEST_F(RoundCheckTest, FindsAWrongOffset) {
  expect_found("offsets: entry 0", [](Received& received) { received.offsets[0] = 4; });
}

TEST_F(RoundCheckTest, FindsAWrongRange) {
  expect_found("ranges: entry 2",
               [](Received& received) { received.ranges[2] += std::int64_t{1} << 32; });
}

TEST_F(RoundCheckTest, FindsAWrongSourceToken) {
  expect_found("source tokens: row 0",
               [](Received& received) { received.experts[0].source_tokens[0] ^= 1; });
}

TEST_F(RoundCheckTest, FindsOneFlippedBitOfAValue) {
  expect_found("values: row 0",
               [](Received& received) { received.experts[0].values[137] ^= std::byte{1}; });
}

TEST_F(RoundCheckTest, FindsTheLastBitOfTheLastValue) {
  expect_found("values: ", [](Received& received) {
    received.experts.back().values.back() ^= std::byte{0x80};
  });
}

TEST_F(RoundCheckTest, FindsTwoSwappedRows) {
  expect_found("", [](Received& received) {
    Received::Rows& rows = received.experts[0];
    ASSERT_GE(rows.source_tokens.size(), 2U);
    std::swap_ranges(rows.values.begin(), rows.values.begin() + 200, rows.values.begin() + 200);
  });
}

TEST_F(RoundCheckTest, FindsAWrongScale) {
  expect_found("scales: row 0",
               [](Received& received) { received.experts[0].scales[5] ^= std::byte{1}; });
}

TEST_F(RoundCheckTest, FindsAWrongCombinedValueAndMeasuresIt) {
  Received received = correct();
  ASSERT_FALSE(received.combined.empty());
  std::uint16_t bits;
  std::memcpy(&bits, received.combined.data(), 2);
  const float before = to_float(bfloat16{bits});
  bits ^= 0x8000;  // the sign
  std::memcpy(received.combined.data(), &bits, 2);
  const Verdict verdict = judge(received);
  ASSERT_EQ(verdict.tally.messages().size(), 1U);
  EXPECT_EQ(verdict.tally.messages()[0].substr(0, 18), "combined: token 0:");
  EXPECT_FLOAT_EQ(static_cast<float>(verdict.max_abs_error), 2 * std::abs(before));
  EXPECT_NE(verdict.hash, expectation().hashes[kRank]);
}

TEST_F(RoundCheckTest, NaNIsTheLargestError) {
  Received received = correct();
  const std::uint16_t nan = 0x7fc0;
  std::memcpy(received.combined.data() + 20, &nan, 2);
  EXPECT_EQ(judge(received).max_abs_error, HUGE_VAL);
}

TEST_F(RoundCheckTest, FindsMissingCombinedTokens) {
  expect_found("combined: ", [](Received& received) { received.combined.pop_back(); });
}

TEST(Tally, TellsTheFirstFailuresOfAKindAndCountsTheOthers) {
  Tally tally;
  for (int i = 0; i < 100; ++i) tally.check(false, "values", [] { return std::string("wrong"); });
  EXPECT_EQ(tally.checks(), 100);
  ASSERT_EQ(tally.messages().size(), 5U);
  EXPECT_EQ(tally.messages()[0], "values: wrong");
  EXPECT_EQ(tally.messages()[4], "values: 96 more failures");
}

}  // namespace
}  // namespace tandem::tools
