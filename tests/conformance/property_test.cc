// Random shapes and routings against the oracle. RapidCheck prints its seed with a failure; the
// same run again: RC_PARAMS="seed=...". More cases: RC_PARAMS="max_success=...".
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <iostream>

#include "support/exchange.h"

namespace tandem::test {
namespace {

int in(int low, int high) { return *rc::gen::inRange(low, high + 1); }
bool coin() { return *rc::gen::arbitrary<bool>(); }

// What all operations on one buffer share.
Shape any_group() {
  Shape shape;
  shape.num_ranks = in(1, 6);
  shape.num_experts = in(1, 20);
  if (coin()) {
    shape.expert_owners.resize(shape.num_experts);
    for (int& owner : shape.expert_owners) owner = in(0, shape.num_ranks - 1);
  }
  return shape;
}

Shape any_operation(Shape shape) {
  shape.hidden = coin() ? in(1, 300) : 8 * in(1, 80);
  shape.topk = in(1, 10);
  shape.max_tokens = in(1, 24);
  shape.tokens.resize(shape.num_ranks);
  for (int& tokens : shape.tokens) tokens = in(0, shape.max_tokens);
  shape.format = static_cast<Format>(in(0, 5));
  shape.x_dtype = static_cast<DType>(in(0, 2));
  shape.placement = static_cast<Placement>(in(0, 2));
  shape.layout = static_cast<Layout>(in(0, 1));
  if (shape.layout == Layout::kPacked && coin()) shape.row_alignment = in(1, 33);
  shape.hook = shape.placement != Placement::kPacked && coin();
  shape.index_dtype = coin() ? DType::kInt32 : DType::kInt64;
  shape.combine_dtype = static_cast<DType>(in(0, 2));
  shape.zero_copy = coin();
  shape.partial_sums = backend_under_test() == Backend::kCpu && coin();
  shape.row_gap = coin() ? in(0, 5) : 0;
  shape.routing = static_cast<Routing>(in(0, 3));
  shape.seed = *rc::gen::arbitrary<std::uint64_t>();
  return shape;
}

// Fails the property. Says so at once as well: shrinking may take long.
void require_no_failures(const std::string& failures) {
  if (failures.empty()) return;
  std::cerr << failures << std::flush;
  RC_FAIL(failures);
}

void expect_property(const std::string& description, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(description, property));
}

// One to three operations on one buffer.
TEST(Property, AnySequenceOfShapesMatchesTheOracle) {
  expect_property("any sequence of shapes matches the oracle", [] {
    const Shape group = any_group();
    std::vector<Shape> shapes;
    for (int count = in(1, 3); count > 0; --count) shapes.push_back(any_operation(group));
    for (const Shape& shape : shapes) RC_LOG() << shape << "\n";
    const std::vector<Scenario> scenarios = make_scenarios(shapes);
    const std::string failures = failures_of_ranks(group.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shapes));
      for (const Scenario& scenario : scenarios) {
        Exchange exchange(rank, scenario, buffer);
        exchange.run(buffer);
      }
    });
    require_no_failures(failures);
  });
}

// Repeated experts and a tight capacity: refused exactly where the oracle says, on all ranks alike;
// right otherwise.
TEST(Property, CapacityIsRefusedExactlyWhereTheOracleSays) {
  expect_property("capacity is refused exactly where the oracle says", [] {
    Shape shape = any_operation(any_group());
    shape.layout = Layout::kPacked;
    shape.routing = Routing::kRepeated;
    BufferOptions options = options_for(shape);
    const reference::Problem problem = make_problem(shape);
    options.capacity_rows = in(1, 2 * shape.num_ranks * shape.max_tokens);
    const bool slotted = shape.placement == Placement::kSlotted || shape.hook;
    const bool refused = reference::exceeds_capacity(
        problem, slotted ? Placement::kSlotted : Placement::kPacked, options.capacity_rows);
    RC_CLASSIFY(refused, "refused");
    RC_LOG() << shape << ", capacity " << options.capacity_rows << "\n";
    const Scenario scenario = solve(shape, problem);
    const std::string failures = failures_of_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenario, buffer);
      for (int repetition = 0; repetition < 2; ++repetition) {
        if (refused) {
          rank.expect_error(ErrorCode::kCapacity, {}, [&] {
            exchange.dispatch(buffer);
            exchange.finish_dispatch();
            rank.settle(buffer);
          });
        } else {
          exchange.run(buffer);
        }
      }
    });
    require_no_failures(failures);
  });
}

// Several batches in flight, combined in any order that the rules allow.
TEST(Property, OverlappedBatchesMatchTheOracle) {
  expect_property("overlapped batches match the oracle", [] {
    const Shape group = any_group();
    std::vector<Shape> shapes;
    for (int batch = 0; batch < 2; ++batch) {
      Shape shape = any_operation(group);
      shape.hook = coin();
      shape.placement = shape.hook ? Placement::kSlotted : shape.placement;
      shapes.push_back(shape);
      RC_LOG() << shape << "\n";
    }
    // An operation without a hook may not overtake a hook that is held back.
    const bool late_hook = shapes[1].hook && coin();
    const bool swapped = coin();
    const int rounds = in(1, 3);
    const std::vector<Scenario> scenarios = make_scenarios(shapes);
    const std::string failures = failures_of_ranks(group.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shapes));
      Exchange a(rank, scenarios[0], buffer);
      Exchange b(rank, scenarios[1], buffer);
      for (int round = 0; round < rounds; ++round) {
        a.dispatch(buffer);
        if (!late_hook) a.finish_dispatch();
        b.dispatch(buffer);
        if (late_hook) a.finish_dispatch();
        b.finish_dispatch();
        a.check_received();
        b.check_received();
        Exchange& first = swapped ? b : a;
        Exchange& second = swapped ? a : b;
        first.provide_outputs(buffer);
        second.provide_outputs(buffer);
        first.combine(buffer);
        if (!(late_hook && second.scenario().shape.hook)) first.finish_combine();
        second.combine(buffer);
        if (late_hook && second.scenario().shape.hook) first.finish_combine();
        second.finish_combine();
        first.check_combined();
        second.check_combined();
      }
    });
    require_no_failures(failures);
  });
}

}  // namespace
}  // namespace tandem::test
