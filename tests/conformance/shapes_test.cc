// Shapes at the edges: every number of ranks, experts, tokens, choices and channels that the
// library allows gives what the oracle says, for every combination of options.
#include <gtest/gtest.h>

#include "support/exchange.h"

namespace tandem::test {
namespace {

// Report: a rank without tokens, whose tensors have no memory, hung or crashed its peers.
TEST(Shapes, RankWithoutTokensTakesPartWithNullTensors) {
  for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
    run_scenario({.num_ranks = 3, .tokens = {5, 0, 8}, .placement = placement});
  }
}

// Report: the same on all ranks at once. Outputs have shape [0, H].
TEST(Shapes, NoRankHasTokens) {
  const Shape shape{.num_ranks = 3, .tokens = {0, 0, 0}};
  Shape slotted = shape;
  slotted.placement = Placement::kSlotted;
  Shape hooked = slotted;
  hooked.hook = true;
  hooked.format = Format::kFp8;
  Shape zero_copy = shape;
  zero_copy.zero_copy = true;
  run_in_turn({shape, slotted, hooked, zero_copy, shape});
}

// An empty tensor may as well have memory.
TEST(Shapes, RankWithoutTokensMayGiveTensorsWithMemory) {
  const Scenario scenario = make_scenario({.num_ranks = 2, .tokens = {0, 4}});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    const Array memory(backend_under_test(), DType::kFloat32, {4, scenario.shape.hidden});
    const auto with_memory = [&](ConstTensorView view) {
      if (view.data == nullptr) view.data = memory.view().data;
      return view;
    };
    TensorView out = exchange.out();
    if (out.data == nullptr) out.data = memory.view().data;
    rank.fence();
    const DispatchResult result = buffer.dispatch(
        with_memory(exchange.x()), with_memory(exchange.topk_idx()), exchange.dispatch_options());
    rank.fence();
    buffer.combine(exchange.staged_y(), with_memory(exchange.topk_weights()), result.handle, out,
                   exchange.combine_options());
    rank.fence();
    rank.expect(compare_received(scenario, rank.index(), result, rank.stream()).empty(),
                "received rows differ");
    exchange.check_combined();
  });
}

// Report: ranks with different numbers of tokens hung.
TEST(Shapes, EveryRankHasAnotherNumberOfTokens) {
  Shape shape{
      .num_ranks = 4, .num_experts = 8, .topk = 4, .max_tokens = 64, .tokens = {0, 1, 7, 64}};
  Shape slotted = shape;
  slotted.placement = Placement::kSlotted;
  Shape hooked = slotted;
  hooked.hook = true;
  hooked.zero_copy = true;
  run_in_turn({shape, slotted, hooked});
}

// Report: after a call with 64 tokens, one with 4 still saw rows of the first as valid.
TEST(Shapes, NothingOfALargeCallSurvivesInASmallOne) {
  Shape large{.num_ranks = 2, .topk = 4, .max_tokens = 64};
  Shape small = large;
  small.tokens = {4, 4};
  small.seed = 2;
  run_in_turn({large, large, small, small, large, small});
}

// Report: hidden sizes outside a compiled list were refused, or wrong in their last channels.
TEST(Shapes, EveryHiddenSizeIsExact) {
  std::vector<Shape> shapes;
  for (const int hidden : {72, 1000, 2880, 3072, 3584, 6144, 6656, 7168, 1, 7, 127, 129, 8191}) {
    Shape shape{.num_experts = 4, .hidden = hidden, .max_tokens = 3, .tokens = {3, 2}};
    shapes.push_back(shape);
    shape.format = Format::kFp8;
    shape.placement = Placement::kSlotted;
    shapes.push_back(shape);
    shape.format = Format::kFp8Ue8m0;
    shape.placement = Placement::kPacked;
    shapes.push_back(shape);
  }
  run_in_turn(shapes);
}

TEST(Shapes, LargestHiddenSizeIsExactInEveryFormat) {
  std::vector<Shape> shapes;
  for (const Format format : {Format::kBFloat16, Format::kFloat16, Format::kFloat32, Format::kFp8,
                              Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    shapes.push_back({.num_experts = 2,
                      .hidden = kMaxHidden,
                      .max_tokens = 1,
                      .format = format,
                      .routing = Routing::kFull});
  }
  run_in_turn(shapes);
}

// Report: only a few values of top-k were compiled.
TEST(Shapes, EveryTopkUpToTheLimitWorks) {
  std::vector<Shape> shapes;
  for (int topk = 1; topk <= kMaxTopk; topk += topk < 33 ? 1 : 31) {
    shapes.push_back({.num_experts = 64,
                      .hidden = 24,
                      .topk = topk,
                      .max_tokens = 3,
                      .routing = Routing::kFull,
                      .seed = static_cast<std::uint64_t>(topk)});
  }
  run_in_turn(shapes);
}

TEST(Shapes, TopkMayExceedTheNumberOfExperts) {
  run_scenario({.num_experts = 3, .topk = 8, .routing = Routing::kFull});
}

// Report: 256 experts over 3 ranks, which share them unevenly.
TEST(Shapes, ExpertsNeedNotDivideByRanks) {
  run_scenario({.num_ranks = 3,
                .num_experts = 256,
                .hidden = 16,
                .topk = 8,
                .max_tokens = 16,
                .layout = Layout::kPacked});
}

// Report: world sizes that are no powers of two.
TEST(Shapes, EveryNumberOfRanksWorks) {
  for (const int ranks : {1, 2, 3, 5, 6, 7}) {
    SCOPED_TRACE(ranks);
    run_scenario({.num_ranks = ranks, .num_experts = 10, .hidden = 48, .topk = 3});
    run_scenario({.num_ranks = ranks,
                  .num_experts = 10,
                  .hidden = 48,
                  .topk = 3,
                  .format = Format::kFp8,
                  .placement = Placement::kSlotted,
                  .hook = true,
                  .zero_copy = true});
  }
}

TEST(Shapes, RanksMayOwnNoExpert) {
  run_scenario({.num_ranks = 4, .num_experts = 2, .topk = 2});
  run_scenario({.num_ranks = 3, .num_experts = 1, .topk = 1, .placement = Placement::kSlotted});
}

TEST(Shapes, ExpertsMayBeMappedToRanksAtWill) {
  const Shape shape{
      .num_ranks = 3, .num_experts = 7, .topk = 3, .expert_owners = {2, 0, 2, 0, 2, 2, 0}};
  Shape slotted = shape;
  slotted.placement = Placement::kSlotted;
  slotted.layout = Layout::kPacked;
  run_in_turn({shape, slotted});
}

// Report: limits on tokens off by one around powers of two, or too low for prefill.
TEST(Shapes, LargestNumberOfTokensWorks) {
  for (const int tokens : {1, 1024, 1025, 4096}) {
    SCOPED_TRACE(tokens);
    run_scenario({.num_experts = 4,
                  .hidden = 8,
                  .max_tokens = tokens,
                  .tokens = {tokens, 1},
                  .layout = Layout::kPacked});
  }
}

// Every combination of format, placement, layout, hook and zero-copy, on one buffer.
TEST(Shapes, EveryCombinationOfOptionsMatchesTheOracle) {
  std::vector<Shape> shapes;
  std::uint64_t seed = 0;
  for (int format = 0; format < 6; ++format) {
    for (const auto& [placement, hook] :
         {std::pair{Placement::kPacked, false}, std::pair{Placement::kSlotted, false},
          std::pair{Placement::kSlotted, true}, std::pair{Placement::kAutomatic, seed % 2 == 0}}) {
      for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
        for (const bool zero_copy : {false, true}) {
          ++seed;
          Shape shape{.num_ranks = 3,
                      .num_experts = 7,
                      .hidden = 200,
                      .topk = 3,
                      .max_tokens = 6,
                      .tokens = {6, 0, 5}};
          shape.format = static_cast<Format>(format);
          shape.x_dtype = static_cast<DType>(seed % 3);
          shape.placement = placement;
          shape.layout = layout;
          shape.row_alignment = layout == Layout::kPacked && seed % 3 == 0 ? 8 : 1;
          shape.hook = hook;
          shape.index_dtype = seed % 2 == 0 ? DType::kInt32 : DType::kInt64;
          shape.combine_dtype = static_cast<DType>((seed / 2) % 3);
          shape.zero_copy = zero_copy;
          shape.row_gap = seed % 5 == 0 ? 3 : 0;
          shape.seed = seed;
          shapes.push_back(shape);
        }
      }
    }
  }
  run_in_turn(shapes);
}

}  // namespace
}  // namespace tandem::test
