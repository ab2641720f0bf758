// Combines of dispatches that had the tokens' weights: sums by rank, the same wherever ranks are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "support/exchange.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

// Several experts of a token on most ranks, none on some.
Shape crowded() {
  return {.num_ranks = 3,
          .num_experts = 11,
          .hidden = 72,
          .topk = 6,
          .max_tokens = 9,
          .tokens = {9, 0, 5},
          .expert_owners = {2, 0, 0, 2, 1, 2, 0, 0, 2, 1, 2},
          .partial_sums = true};
}

TEST(PartialSums, OfAllTypesFormatsAndRoutings) {
  std::vector<Shape> shapes;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const Routing routing :
         {Routing::kMixed, Routing::kFull, Routing::kHot, Routing::kNone, Routing::kRepeated}) {
      Shape shape = crowded();
      shape.combine_dtype = dtype;
      shape.routing = routing;
      shape.layout = routing == Routing::kRepeated ? Layout::kPacked : Layout::kPadded;
      shape.zero_copy = routing == Routing::kMixed;
      shape.seed = shapes.size();
      shapes.push_back(shape);
    }
  }
  for (const Format format :
       {Format::kFloat16, Format::kFloat32, Format::kFp8, Format::kFp8Ue8m0}) {
    Shape shape = crowded();
    shape.format = format;
    shape.row_gap = 3;
    shapes.push_back(shape);
  }
  run_in_turn(shapes);
}

TEST(PartialSums, HeldBackByHooks) {
  Shape shape = crowded();
  shape.placement = Placement::kSlotted;
  shape.hook = true;
  Shape packed = shape;
  packed.layout = Layout::kPacked;
  packed.zero_copy = true;
  run_in_turn({shape, packed, shape});
}

// Also that a list with weights is not taken for one without, nor the other way round.
TEST(PartialSums, InTurnWithOtherCombines) {
  Shape rows = crowded();
  rows.partial_sums = false;
  rows.placement = Placement::kSlotted;
  rows.hook = true;
  std::vector<Shape> shapes;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    shapes.push_back(seed % 3 == 0 ? rows : crowded());
    shapes.back().seed = seed;
  }
  run_in_turn(shapes);
}

// What it gave last time would land among the parts of others.
TEST(PartialSums, WhoReceivedNothingGivesNothing) {
  Shape shape{.num_ranks = 3,
              .num_experts = 3,
              .hidden = 72,
              .topk = 1,
              .max_tokens = 9,
              .partial_sums = true};
  std::vector<Scenario> scenarios;
  for (std::int64_t i = 0; i < 9; ++i) {
    shape.seed = static_cast<std::uint64_t>(i);
    reference::Problem problem = make_problem(shape);
    for (reference::RankInput& input : problem.ranks) {
      std::fill(input.topk_idx.begin(), input.topk_idx.end(), i % 3);
    }
    scenarios.push_back(solve(shape, std::move(problem)));
  }
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    for (std::size_t i = 0; i < scenarios.size(); ++i) {
      Exchange exchange(rank, scenarios[i], buffer);
      exchange.dispatch(buffer);
      exchange.provide_outputs(buffer);
      // The owner first, then the one before, then whom both would give something.
      std::this_thread::sleep_for(5ms * ((i + 3 - static_cast<std::size_t>(rank.index())) % 3));
      exchange.combine(buffer);
      exchange.check_combined();
    }
  });
}

// Or the tests above would pass without any.
TEST(PartialSums, AreNotTheSumInTheOrderOfK) {
  Scenario scenario = make_scenario(crowded());
  const auto partial = scenario.out;
  scenario.problem.partial_sums = false;
  const auto ordinary = reference::combine(scenario.problem, scenario.y, DType::kBFloat16);
  EXPECT_NE(partial, ordinary);
}

// One rounding of the parts and one of their sum, each half a unit in the last place of bf16 at the
// most, of parts that are no larger than the sum of magnitudes.
TEST(PartialSums, DifferByRoundingAlone) {
  Scenario scenario = make_scenario(crowded());
  const auto partial = scenario.out;
  Scenario exact = scenario;
  exact.problem.partial_sums = false;
  exact.out = reference::combine(exact.problem, exact.y, DType::kBFloat16);
  Scenario magnitudes = exact;
  for (reference::RankInput& input : magnitudes.problem.ranks) {
    for (float& weight : input.topk_weights) weight = std::abs(weight);
  }
  for (std::vector<std::byte>& y : magnitudes.y) {
    for (std::size_t i = 1; i < y.size(); i += 2) y[i] &= std::byte{0x7f};
  }
  magnitudes.out = reference::combine(magnitudes.problem, magnitudes.y, DType::kBFloat16);
  const auto value = [](const std::vector<std::byte>& bytes, std::size_t i) {
    bfloat16 element;
    std::memcpy(&element, bytes.data() + 2 * i, sizeof element);
    return to_float(element);
  };
  for (std::size_t rank = 0; rank < partial.size(); ++rank) {
    for (std::size_t i = 0; i < partial[rank].size() / 2; ++i) {
      const float limit = 3 * 0x1p-8F * value(magnitudes.out[rank], i);
      EXPECT_NEAR(value(partial[rank], i), value(exact.out[rank], i), limit);
    }
  }
}

TEST(PartialSums, WeightsOfTheDispatchAreNotGivenAgain) {
  const Scenario scenario = make_scenario(crowded());
  run_ranks(scenario.shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    exchange.provide_outputs(buffer);
    rank.expect_error(ErrorCode::kInvalidArgument, {"topk_weights", "dispatch"}, [&] {
      buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                     exchange.out(), exchange.combine_options());
    });
    exchange.combine(buffer);
    exchange.check_combined();
  });
}

TEST(PartialSums, WrongWeightsAreRefusedBeforeAnythingIsSent) {
  Shape shape = crowded();
  shape.tokens = {};
  const Scenario scenario = make_scenario(shape);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    const auto expect_refused = [&](DType dtype, std::int64_t tokens, std::int64_t topk,
                                    const std::vector<std::string>& words) {
      const Array weights(backend_under_test(), dtype, {tokens, topk});
      DispatchOptions options = exchange.dispatch_options();
      options.topk_weights = weights;
      rank.expect_error(ErrorCode::kInvalidArgument, words,
                        [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
    };
    expect_refused(DType::kFloat32, 9, 5, {"topk_weights", "[9, 5]", "[9, 6]"});
    expect_refused(DType::kFloat32, 8, 6, {"topk_weights", "[8, 6]", "[9, 6]"});
    expect_refused(DType::kBFloat16, 9, 6, {"topk_weights", "bf16", "fp32"});
    exchange.run(buffer);
  });
}

TEST(PartialSums, ABufferWithoutCombineHasNone) {
  const Scenario scenario = make_scenario(crowded());
  run_ranks(scenario.shape.num_ranks, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.combine = false;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    rank.expect_error(ErrorCode::kInvalidArgument, {"topk_weights", "combine = false"},
                      [&] { exchange.dispatch(buffer); });
  });
}

TEST(PartialSums, OnEveryRankOrOnNone) {
  const Scenario scenario = make_scenario(crowded());
  run_ranks(scenario.shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    DispatchOptions options = exchange.dispatch_options();
    if (rank.index() == 1) options.topk_weights = {};
    rank.expect_error(ErrorCode::kMismatch, {"rank 1", "topk_weights"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
    buffer.recover();
    exchange.run(buffer);
  });
}

}  // namespace
}  // namespace tandem::test
