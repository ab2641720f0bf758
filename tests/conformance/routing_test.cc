// Routings that users meet: masked choices, hot experts, repeated experts, both index types; counts
// and the order of rows.
#include <gtest/gtest.h>

#include "support/exchange.h"

namespace tandem::test {
namespace {

// Report: per-expert counts differed from the histogram of what arrived once -1 was present.
TEST(Routing, CountsAreTheHistogramOfWhatWasReceived) {
  const Shape shape{.num_ranks = 3, .num_experts = 9, .topk = 4, .max_tokens = 32};
  const Scenario scenario = make_scenario(shape);
  std::vector<std::int32_t> histogram(shape.num_experts);
  for (const reference::RankInput& input : scenario.problem.ranks) {
    for (const std::int64_t expert : input.topk_idx) {
      if (expert >= 0) ++histogram[expert];
    }
  }
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    const auto counts = download_as<std::int32_t>(exchange.result().counts, rank.stream());
    const std::vector<int> experts = buffer.local_experts();
    rank.expect_equal(counts.size(), experts.size(), "number of counts");
    for (std::size_t local = 0; local < counts.size(); ++local) {
      rank.expect_equal(counts[local], histogram[experts[local]],
                        "count of expert " + std::to_string(experts[local]));
    }
    exchange.check_received();
  });
}

// Rows of only -1 give zeros, whatever memory held before.
TEST(Routing, TokensWithoutExpertsGiveZeros) {
  Shape nothing{.num_ranks = 2, .routing = Routing::kNone};
  Shape something = nothing;
  something.routing = Routing::kFull;
  run_in_turn({something, nothing, something, nothing});
}

// Any negative index selects nothing, not -1 alone.
TEST(Routing, EveryNegativeIndexSelectsNothing) {
  for (const DType index_dtype : {DType::kInt32, DType::kInt64}) {
    const Shape shape{.num_ranks = 2, .topk = 4, .index_dtype = index_dtype};
    reference::Problem problem = make_problem(shape);
    std::int64_t negative = -1;
    for (reference::RankInput& input : problem.ranks) {
      for (std::size_t place = 0; place < input.topk_idx.size(); place += 3) {
        input.topk_idx[place] = negative;
        negative = negative < -(1LL << 29) ? -2147483648LL : negative * 3;
      }
    }
    run_scenario(solve(shape, problem));
  }
}

// 64-bit indices whose low half looks like an expert are negative all the same.
TEST(Routing, NegativeIndexIsNotReadAsItsLowHalf) {
  const Shape shape{.num_ranks = 2, .routing = Routing::kFull};
  reference::Problem problem = make_problem(shape);
  problem.ranks[0].topk_idx[0] = -(1LL << 40) + 1;
  problem.ranks[1].topk_idx[3] = std::numeric_limits<std::int64_t>::min() + 2;
  run_scenario(solve(shape, problem));
}

// Every token of every rank to one expert.
TEST(Routing, OneExpertMayReceiveEverything) {
  const Shape shape{
      .num_ranks = 3, .num_experts = 6, .topk = 1, .max_tokens = 40, .routing = Routing::kHot};
  Shape slotted = shape;
  slotted.placement = Placement::kSlotted;
  run_in_turn({shape, slotted});
}

// Report: a token that names one expert twice lost a row or a weight.
TEST(Routing, RepeatedExpertIsTwoRowsBothWeighted) {
  for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
    for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
      // Room for twice the rows of distinct choices: few tokens in a buffer made for many.
      const Shape shape{.num_ranks = 2,
                        .num_experts = 4,
                        .topk = 2,
                        .max_tokens = 8,
                        .tokens = {3, 2},
                        .placement = placement,
                        .layout = layout,
                        .routing = Routing::kRepeated,
                        .seed = 5};
      reference::Problem problem = make_problem(shape);
      for (reference::RankInput& input : problem.ranks) {
        for (int token = 0; token < input.num_tokens; token += 2) {
          input.topk_idx[2 * token + 1] = input.topk_idx[2 * token];
        }
      }
      run_scenario(solve(shape, problem));
    }
  }
}

// Report: indices of one integer type were read as the other.
TEST(Routing, BothIndexTypesGiveTheSameRows) {
  for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
    Shape wide{.num_ranks = 3, .topk = 4, .placement = placement, .index_dtype = DType::kInt64};
    Shape narrow = wide;
    narrow.index_dtype = DType::kInt32;
    run_in_turn({wide, narrow, wide});
  }
}

// Report: the order of received rows changed from run to run. It is documented: expert, source
// rank, token, place in the top-k; the oracle's order is that one, so here only repetition counts.
TEST(Routing, OrderOfRowsIsTheSameEveryTime) {
  const Shape shape{
      .num_ranks = 4, .num_experts = 6, .topk = 3, .max_tokens = 24, .layout = Layout::kPacked};
  Shape slotted = shape;
  slotted.placement = Placement::kSlotted;
  std::vector<Shape> shapes;
  for (int repetition = 0; repetition < 10; ++repetition) {
    shapes.push_back(shape);
    shapes.push_back(slotted);
  }
  run_in_turn(shapes);
}

// The packed layout starts every expert at a multiple of the caller's number, empty ones too.
TEST(Routing, ExpertsStartAtTheAlignmentAskedFor) {
  std::vector<Shape> shapes;
  for (const int alignment : {1, 2, 7, 16, 128}) {
    for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
      shapes.push_back({.num_ranks = 2,
                        .num_experts = 5,
                        .placement = placement,
                        .layout = Layout::kPacked,
                        .row_alignment = alignment});
    }
  }
  run_in_turn(shapes);
}

// Weights of zero still multiply: a zero times infinity is NaN, as the sum says.
TEST(Routing, WeightsOfAnySignAndSizeAreApplied) {
  const Shape shape{
      .num_ranks = 2, .topk = 3, .combine_dtype = DType::kFloat32, .routing = Routing::kFull};
  reference::Problem problem = make_problem(shape);
  for (reference::RankInput& input : problem.ranks) {
    input.topk_weights[0] = 0.0F;
    input.topk_weights[1] = -0.0F;
    input.topk_weights[2] = -3.5e37F;
    input.topk_weights[3] = 1e-41F;  // subnormal: nothing may flush it
    input.topk_weights[4] = std::numeric_limits<float>::infinity();
    input.topk_weights[5] = std::numeric_limits<float>::quiet_NaN();
  }
  run_scenario(solve(shape, problem));
}

}  // namespace
}  // namespace tandem::test
