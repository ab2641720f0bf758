// Buffers smaller than the worst case: what fits works, what does not is refused on all ranks
// alike, with nothing written, and the buffer goes on.
#include <gtest/gtest.h>

#include "support/exchange.h"

namespace tandem::test {
namespace {

struct Pressure {
  Shape shape;
  std::int64_t capacity_rows = 0;
};

// A scenario that fits, and one like it that some rank cannot take.
void expect_capacity_error(const Pressure& pressure, const reference::Problem& too_much,
                           const std::vector<std::string>& fragments) {
  const Shape& shape = pressure.shape;
  ASSERT_TRUE(reference::exceeds_capacity(
      too_much, shape.hook ? Placement::kSlotted : shape.placement, pressure.capacity_rows));
  Shape small = shape;
  small.tokens.assign(shape.num_ranks, 1);
  const Scenario fits = make_scenario(small);
  Scenario overflows;
  overflows.shape = shape;
  overflows.problem = too_much;
  overflows.y.resize(shape.num_ranks);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    BufferOptions options = options_for(shape);
    options.capacity_rows = pressure.capacity_rows;
    Buffer buffer(rank.communicator(), options);
    rank.expect_equal(buffer.capacity_rows(), pressure.capacity_rows, "capacity");
    Exchange before(rank, fits, buffer);
    Exchange refused(rank, overflows, buffer);
    Exchange after(rank, fits, buffer);
    for (int repetition = 0; repetition < 3; ++repetition) {
      before.dispatch(buffer);
      before.finish_dispatch();
      const ErrorInfo info = rank.expect_error(ErrorCode::kCapacity, fragments, [&] {
        refused.dispatch(buffer);
        refused.finish_dispatch();
        rank.settle(buffer);
      });
      rank.expect_equal(name(info.operation), name(Operation::kDispatch), "operation");
      if (shape.placement == Placement::kSlotted) {
        rank.expect(refused.recv_x().untouched(rank.stream()), "rows were written");
      }
      // The dispatch before is as it was, and combines.
      before.check_received();
      before.provide_outputs(buffer);
      before.combine(buffer);
      before.finish_combine();
      before.check_combined();
      after.run(buffer);
    }
  });
}

// Report: a lower capacity than the worst case. All ranks see the counts before a row is sent, so
// all refuse alike.
TEST(Capacity, RowsBeyondTheCapacityAreRefusedOnAllRanks) {
  const Shape shape{.num_ranks = 3,
                    .num_experts = 6,
                    .topk = 1,
                    .max_tokens = 8,
                    .layout = Layout::kPacked,
                    .routing = Routing::kHot};
  expect_capacity_error({shape, 20}, make_problem(shape), {"24", "20"});
}

// 24 and 8 rows fit into 40, but not when the second expert starts at 32 and ends at 48.
TEST(Capacity, AlignmentCountsAgainstTheCapacity) {
  const Shape shape{.num_ranks = 2,
                    .num_experts = 4,
                    .topk = 2,
                    .max_tokens = 12,
                    .layout = Layout::kPacked,
                    .row_alignment = 16};
  reference::Problem problem = make_problem(shape);
  for (reference::RankInput& input : problem.ranks) {
    for (int token = 0; token < input.num_tokens; ++token) {
      input.topk_idx[2 * token] = 0;
      input.topk_idx[2 * token + 1] = token < 4 ? 1 : 2;
    }
  }
  expect_capacity_error({shape, 40}, problem, {"48", "40"});
}

TEST(Capacity, SlottedRowsBeyondTheCapacityAreRefusedInTheHook) {
  for (const bool hook : {false, true}) {
    const Shape shape{.num_ranks = 3,
                      .num_experts = 6,
                      .topk = 1,
                      .max_tokens = 8,
                      .placement = Placement::kSlotted,
                      .layout = Layout::kPacked,
                      .hook = hook,
                      .routing = Routing::kHot};
    expect_capacity_error({shape, 20}, make_problem(shape), {"24", "20"});
  }
}

// A refused dispatch had been sent: the half that it took is taken, and whoever had it is told.
TEST(Capacity, HandleWhoseHalfWentToARefusedDispatchIsStale) {
  const Shape shape{.num_ranks = 2,
                    .num_experts = 2,
                    .topk = 1,
                    .max_tokens = 8,
                    .layout = Layout::kPacked,
                    .routing = Routing::kHot};
  Shape small = shape;
  small.tokens = {1, 1};
  const Scenario fits = make_scenario(small);
  Scenario overflows;
  overflows.shape = shape;
  overflows.problem = make_problem(shape);
  overflows.y.resize(2);
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(shape);
    options.capacity_rows = 4;
    Buffer buffer(rank.communicator(), options);
    Exchange a(rank, fits, buffer);
    Exchange b(rank, fits, buffer);
    Exchange refused(rank, overflows, buffer);
    a.dispatch(buffer);
    b.dispatch(buffer);
    rank.expect_error(ErrorCode::kCapacity, {"16", "4"}, [&] {
      refused.dispatch(buffer);
      rank.settle(buffer);
    });
    rank.expect_error(ErrorCode::kStaleHandle, {"handle"}, [&] {
      buffer.combine(a.staged_y(), a.topk_weights(), a.result().handle, a.out(),
                     a.combine_options());
    });
    b.check_received();
    b.provide_outputs(buffer);
    b.combine(buffer);
    b.check_combined();
  });
}

// The same expert twice in a token: legal, two rows, as far as capacity goes.
TEST(Capacity, RepeatedExpertsBeyondThePaddedSpaceAreRefused) {
  const Shape shape{
      .num_ranks = 2, .num_experts = 4, .topk = 2, .max_tokens = 8, .routing = Routing::kRepeated};
  reference::Problem problem = make_problem(shape);
  for (reference::RankInput& input : problem.ranks) {
    for (std::int64_t& expert : input.topk_idx) expert = 3;
  }
  expect_capacity_error({shape, 32}, problem, {"32", "16"});
}

TEST(Capacity, RepeatedExpertsBeyondTheSlotsOfASourceAreRefused) {
  for (const bool hook : {false, true}) {
    const Shape shape{.num_ranks = 2,
                      .num_experts = 2,
                      .topk = 2,
                      .max_tokens = 8,
                      .placement = Placement::kSlotted,
                      .layout = Layout::kPacked,
                      .hook = hook,
                      .routing = Routing::kRepeated};
    reference::Problem problem = make_problem(shape);
    for (std::int64_t& expert : problem.ranks[1].topk_idx) expert = 0;
    for (std::int64_t& expert : problem.ranks[0].topk_idx) expert = -1;
    expect_capacity_error({shape, 64}, problem, {"16", "8"});
  }
}

TEST(Capacity, RepeatedExpertsUpToTheCapacityWork) {
  Shape shape{.num_ranks = 2,
              .num_experts = 4,
              .topk = 2,
              .max_tokens = 8,
              .layout = Layout::kPacked,
              .routing = Routing::kRepeated};
  reference::Problem problem = make_problem(shape);
  for (reference::RankInput& input : problem.ranks) {
    for (std::int64_t& expert : input.topk_idx) expert = 2;
  }
  // 2 ranks * 8 tokens * 2 rows: exactly the worst case of distinct choices.
  run_scenario(solve(shape, problem));
}

// Exactly full works; the last row is as good as the first.
TEST(Capacity, BufferWorksUpToItsLastRow) {
  for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
    const Shape shape{.num_ranks = 3,
                      .num_experts = 3,
                      .topk = 1,
                      .max_tokens = 7,
                      .placement = placement,
                      .layout = Layout::kPacked,
                      .zero_copy = true,
                      .routing = Routing::kHot};
    const Scenario scenario = make_scenario(shape);
    ASSERT_EQ(scenario.received[0].num_rows, 21);
    run_ranks(3, [&](Rank& rank) {
      BufferOptions options = options_for(shape);
      options.capacity_rows = 21;
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenario, buffer);
      for (int repetition = 0; repetition < 3; ++repetition) exchange.run(buffer);
    });
  }
}

// The documented formulas for the default.
TEST(Capacity, DefaultIsTheWorstCase) {
  run_ranks(3, [](Rank& rank) {
    BufferOptions options{.backend = backend_under_test(),
                          .num_experts = 7,
                          .max_tokens = 10,
                          .max_hidden = 16,
                          .max_topk = 2};
    // Rank 0 owns 3 experts, the most.
    rank.expect_equal(Buffer(rank.communicator(), options).capacity_rows(), 3 * 10 * 3, "padded");
    options.padded_layout = false;
    rank.expect_equal(Buffer(rank.communicator(), options).capacity_rows(), 3 * 10 * 2, "packed");
    options.max_topk = 8;
    rank.expect_equal(Buffer(rank.communicator(), options).capacity_rows(), 3 * 10 * 3, "wide");
    options.capacity_rows = 17;
    rank.expect_equal(Buffer(rank.communicator(), options).capacity_rows(), 17, "as asked");
  });
}

}  // namespace
}  // namespace tandem::test
