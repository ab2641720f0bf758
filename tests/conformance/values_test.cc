// Values that formats find hard: NaN, infinities, zeros, subnormals, groups without a signal.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/exchange.h"

namespace tandem::test {
namespace {

constexpr Format kFp8Formats[] = {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0};

// Report: NaN and infinity were lost or changed on their way. Every bit pattern of 16 bits travels.
TEST(Values, EveryBitPatternTravelsUnharmed) {
  for (const Format format : {Format::kBFloat16, Format::kFloat16}) {
    for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
      const Shape shape{.num_ranks = 2,
                        .num_experts = 2,
                        .hidden = 4096,
                        .max_tokens = 8,
                        .format = format,
                        .placement = placement,
                        .combine_dtype = value_dtype(format),
                        .routing = Routing::kFull};
      reference::Problem problem = make_problem(shape);
      std::uint16_t pattern = 0;
      for (reference::RankInput& input : problem.ranks) {
        for (std::size_t offset = 0; offset < input.x.size(); offset += sizeof(pattern)) {
          std::memcpy(&input.x[offset], &pattern, sizeof(pattern));
          ++pattern;
        }
      }
      run_scenario(solve(shape, problem));
    }
  }
}

// Signalling NaNs too: a load into a float register must not quieten them.
TEST(Values, Float32PatternsTravelUnharmed) {
  const Shape shape{.num_ranks = 2,
                    .hidden = 40,
                    .format = Format::kFloat32,
                    .combine_dtype = DType::kFloat32,
                    .routing = Routing::kFull};
  reference::Problem problem = make_problem(shape);
  constexpr std::uint32_t kPatterns[] = {0x7f800001, 0x7fc00000, 0xffc12345, 0x7f800000,
                                         0xff800000, 0x00000001, 0x80000000, 0x807fffff};
  for (reference::RankInput& input : problem.ranks) {
    for (std::size_t index = 0; index < std::size(kPatterns); ++index) {
      std::memcpy(&input.x[5 * index * sizeof(float)], &kPatterns[index], sizeof(float));
    }
  }
  run_scenario(solve(shape, problem));
}

// In fp8 the group of a NaN says NaN, and no other group is touched.
TEST(Values, NanSpoilsItsOwnFp8GroupOnly) {
  for (const Format format : kFp8Formats) {
    const Shape shape{.num_ranks = 2,
                      .num_experts = 2,
                      .hidden = 520,
                      .max_tokens = 4,
                      .format = format,
                      .x_dtype = DType::kFloat32,
                      .routing = Routing::kFull};
    reference::Problem problem = make_problem(shape);
    constexpr int kNanChannel = 130;       // in group 1
    constexpr int kInfinityChannel = 519;  // in the short last group, of another token
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float infinity = -std::numeric_limits<float>::infinity();
    for (reference::RankInput& input : problem.ranks) {
      std::memcpy(&input.x[kNanChannel * sizeof(float)], &nan, sizeof(nan));
      std::memcpy(&input.x[(shape.hidden + kInfinityChannel) * sizeof(float)], &infinity,
                  sizeof(infinity));
    }
    const Scenario scenario = solve(shape, problem);
    // What the oracle says is what users were promised.
    for (const reference::RankOutput& received : scenario.received) {
      const std::vector<float> values = reference::dequantise(received, shape.hidden, format);
      for (std::int64_t row = 0; row < received.num_rows; ++row) {
        if (received.source_tokens[row] < 0) continue;
        for (int channel = 0; channel < shape.hidden; ++channel) {
          const bool spoilt = (received.source_tokens[row] == 0 && channel / 128 == 1) ||
                              (received.source_tokens[row] == 1 && channel / 128 == 4);
          ASSERT_EQ(std::isnan(values[row * shape.hidden + channel]), spoilt)
              << "row " << row << " channel " << channel;
        }
      }
    }
    run_scenario(scenario);
  }
}

// A group of zeros dequantises to zeros, of either sign.
TEST(Values, ZeroGroupStaysZeroInFp8) {
  for (const Format format : kFp8Formats) {
    const Shape shape{.num_ranks = 2,
                      .num_experts = 2,
                      .hidden = 300,
                      .max_tokens = 3,
                      .format = format,
                      .x_dtype = DType::kFloat32,
                      .routing = Routing::kFull};
    reference::Problem problem = make_problem(shape);
    for (reference::RankInput& input : problem.ranks) {
      for (int token = 0; token < input.num_tokens; ++token) {
        float* group = reinterpret_cast<float*>(input.x.data()) + token * shape.hidden + 128;
        for (int channel = 0; channel < 128; ++channel) {
          group[channel] = channel % 2 == 0 ? 0.0F : -0.0F;
        }
      }
    }
    const Scenario scenario = solve(shape, problem);
    for (const reference::RankOutput& received : scenario.received) {
      const std::vector<float> values = reference::dequantise(received, shape.hidden, format);
      for (std::int64_t row = 0; row < received.num_rows; ++row) {
        for (int channel = 128; channel < 256; ++channel) {
          ASSERT_EQ(values[row * shape.hidden + channel], 0.0F);
        }
      }
    }
    run_scenario(scenario);
  }
}

// Groups far apart in size, down to subnormals and up to the largest float, keep to themselves.
TEST(Values, Fp8GroupsOfEveryMagnitudeAreExact) {
  std::vector<Scenario> scenarios;
  std::vector<Shape> shapes;
  for (const Format format : kFp8Formats) {
    for (const DType x_dtype : {DType::kBFloat16, DType::kFloat32}) {
      Shape shape{.num_ranks = 2,
                  .num_experts = 2,
                  .hidden = 128 * 12 + 5,
                  .max_tokens = 2,
                  .format = format,
                  .x_dtype = x_dtype,
                  .routing = Routing::kFull};
      reference::Problem problem = make_problem(shape);
      for (reference::RankInput& input : problem.ranks) {
        std::vector<float> values(input.num_tokens * shape.hidden);
        for (std::size_t index = 0; index < values.size(); ++index) {
          const int group = static_cast<int>(index % shape.hidden) / 128;
          const float sign = index % 3 == 0 ? -1.0F : 1.0F;
          values[index] =
              sign * std::ldexp(1.0F + static_cast<float>(index % 97) / 97.0F, group * 23 - 148);
        }
        input.x = encode(values, x_dtype);
      }
      scenarios.push_back(solve(shape, problem));
      shapes.push_back(shape);
    }
  }
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shapes));
    for (const Scenario& scenario : scenarios) {
      Exchange exchange(rank, scenario, buffer);
      exchange.run(buffer);
    }
  });
}

// Sums that overflow the output's type, cancel, or are subnormal round as the oracle's do.
TEST(Values, CombineRoundsLikeTheOracleAtTheEdges) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    const Shape shape{
        .num_ranks = 2, .hidden = 37, .topk = 4, .combine_dtype = dtype, .routing = Routing::kFull};
    Scenario scenario = make_scenario(shape);
    constexpr float kOutputs[] = {65504.0F, -65504.0F, 3e38F, 1e-40F, 6e-8F,     1.0F,
                                  -1.0F,    0.0F,      -0.0F, 1e30F,  1.0009765F};
    for (std::size_t rank = 0; rank < scenario.y.size(); ++rank) {
      const reference::RankOutput& received = scenario.received[rank];
      std::vector<float> values(received.num_rows * shape.hidden);
      for (std::size_t index = 0; index < values.size(); ++index) {
        values[index] = kOutputs[(index * 7 + index / 5) % std::size(kOutputs)];
      }
      scenario.y[rank] = encode(values, dtype);
    }
    scenario.out = reference::combine(scenario.problem, scenario.y, dtype);
    run_scenario(scenario);
  }
}

}  // namespace
}  // namespace tandem::test
