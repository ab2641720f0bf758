// The lean expectation (tokens once, rows by index, the oracle in portions) says the same as the
// oracle run on the whole problem in the padded layout.
#include "test_low_latency/expectation.h"

#include <gtest/gtest.h>

#include <vector>

#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {
namespace {

class ExpectationTest : public testing::TestWithParam<Format> {};

TEST_P(ExpectationTest, EqualsTheOracleOnTheWholeProblem) {
  const Format format = GetParam();
  // Wide enough that the oracle is fed in several portions.
  const Shape shape{.ranks = 3,
                    .tokens = 17,
                    .hidden = 65536,
                    .topk = 6,
                    .experts = 7,
                    .uneven = true,
                    .masked = 2};
  const Scenario scenario =
      make_scenario(shape, 5, {{.format = format, .layout = Layout::kPadded}});
  const Expectation& expectation = scenario.expectations.at(format);
  const Arrivals& arrivals = scenario.arrivals.at(Layout::kPadded);

  const auto outputs = reference::dispatch(expectation.problem);
  const DType dtype = token_dtype(format);
  const std::size_t hidden = 65536;
  const std::size_t value_bytes = hidden * static_cast<std::size_t>(size_of(value_dtype(format)));
  const std::size_t scale_bytes = static_cast<std::size_t>(num_scales(format, 65536)) * 4;
  std::vector<std::vector<std::byte>> y;
  for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
    const reference::RankOutput& output = outputs[rank];
    EXPECT_EQ(arrivals[rank].counts, output.counts);
    EXPECT_EQ(arrivals[rank].offsets, output.offsets);
    EXPECT_EQ(arrivals[rank].ranges, output.ranges);
    EXPECT_EQ(arrivals[rank].source_tokens, output.source_tokens);
    EXPECT_EQ(arrivals[rank].source_ranks, output.source_ranks);
    for (std::size_t row = 0; row < output.source_tokens.size(); ++row) {
      if (output.source_tokens[row] < 0) continue;
      const auto& encoded = expectation.encoded[static_cast<std::size_t>(output.source_ranks[row])];
      const auto token = static_cast<std::size_t>(output.source_tokens[row]);
      const auto same = [&](const auto& rows, const auto& tokens, std::size_t bytes) {
        return std::equal(rows.begin() + static_cast<long>(row * bytes),
                          rows.begin() + static_cast<long>((row + 1) * bytes),
                          tokens.begin() + static_cast<long>(token * bytes));
      };
      EXPECT_TRUE(same(output.values, encoded.values, value_bytes));
      EXPECT_TRUE(same(output.scales, encoded.scales, scale_bytes));
    }
    const std::vector<float> x = reference::dequantise(output, 65536, format);
    std::vector<std::byte> outputs_of_rank(x.size() * static_cast<std::size_t>(size_of(dtype)));
    const std::size_t y_bytes = hidden * static_cast<std::size_t>(size_of(dtype));
    for (std::size_t local = 0; local < output.experts.size(); ++local) {
      const auto first = static_cast<std::size_t>(output.offsets[local]);
      const auto count = static_cast<std::size_t>(output.counts[local]);
      apply_expert(output.experts[local], std::span(x).subspan(first * hidden, count * hidden),
                   dtype, std::span(outputs_of_rank).subspan(first * y_bytes, count * y_bytes));
    }
    y.push_back(std::move(outputs_of_rank));
  }
  EXPECT_EQ(expectation.combined, reference::combine(expectation.problem, y, dtype));
}

INSTANTIATE_TEST_SUITE_P(Formats, ExpectationTest,
                         testing::Values(Format::kBFloat16, Format::kFp8Ue8m0));

TEST(Scenario, HasWhatTheCombinationsNameAndNoMore) {
  const Shape shape{.ranks = 2, .tokens = 3, .hidden = 16, .topk = 2, .experts = 4};
  const Scenario scenario =
      make_scenario(shape, 1,
                    {{.format = Format::kFp8, .layout = Layout::kPacked},
                     {.format = Format::kFloat16, .layout = Layout::kPacked}});
  EXPECT_EQ(scenario.expectations.size(), 2U);
  EXPECT_EQ(scenario.arrivals.size(), 1U);
}

TEST(Scenario, HashesDoNotDependOnTheLayout) {
  const Shape shape{.ranks = 2, .tokens = 3, .hidden = 16, .topk = 2, .experts = 4};
  const auto hashes = [&](Layout layout) {
    const Scenario scenario = make_scenario(shape, 1, {{.layout = layout}});
    return scenario.expectations.at(Format::kBFloat16).hashes;
  };
  EXPECT_EQ(hashes(Layout::kPadded), hashes(Layout::kPacked));
}

}  // namespace
}  // namespace tandem::tools
