// After operations have failed: every rank has the same error, with both sides' values; all
// recover, and the next correct call works.
#include <gtest/gtest.h>

#include <thread>

#include "support/exchange.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kOdd = 1;                          // the rank that does something else
constexpr std::chrono::nanoseconds kLimit = 1s;  // in which the others come, on a busy machine too

Shape entangled() {
  return {.num_ranks = 3,
          .num_experts = 6,
          .topk = 4,
          .max_tokens = 8,
          .tokens = {8, 3, 5},
          .routing = Routing::kFull};
}

BufferOptions impatient(const Shape& shape) {
  BufferOptions options = options_for(shape);
  options.slotted_placement = true;
  options.max_hidden = 2 * shape.hidden;
  options.max_topk = shape.topk + 1;
  options.timeout = with_patience(kLimit);
  return options;
}

// The first operation, and on a GPU its end.
void attempt(Rank& rank, Buffer& buffer, Exchange& exchange) {
  exchange.dispatch(buffer);
  rank.settle(buffer);
}

void expect_recovery(Rank& rank, Buffer& buffer, const Scenario& scenario) {
  const std::vector<bool> active = buffer.recover();
  rank.expect(std::find(active.begin(), active.end(), false) == active.end(), "all are there");
  {
    Exchange exchange(rank, scenario, buffer);
    rank.barrier();
    for (int pair = 0; pair < 3; ++pair) exchange.run(buffer);
    rank.expect(!buffer.last_loss(), "nothing is wrong any more");
    rank.barrier();
  }
  rank.barrier();  // memory is given back, which on a GPU waits for whatever runs there
}

TEST(Recovery, AfterATimeoutTheBufferServesAgain) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    BufferOptions options = impatient(scenario.shape);
    options.first_epoch = 0xfffffffcU;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    for (int round = 0; round < 3; ++round) {
      exchange.run(buffer);
      rank.barrier();
      if (rank.index() != kOdd) {
        const ErrorInfo info = rank.expect_error(ErrorCode::kTimeout, {"waited for", "rank 1"},
                                                 [&] { attempt(rank, buffer, exchange); });
        rank.expect_equal(info.peer, kOdd, "culprit");
      }
      rank.barrier();
      // The one that was missed is told as soon as it comes.
      if (rank.index() == kOdd) {
        rank.expect_error(ErrorCode::kTimeout, {"waited for", "rank 1"},
                          [&] { attempt(rank, buffer, exchange); });
      }
      expect_recovery(rank, buffer, scenario);
    }
  });
}

// One call fewer: both counts are named on both sides.
TEST(Recovery, AfterWrongCountsOfCalls) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    Buffer buffer(rank.communicator(), impatient(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
    exchange.run(buffer);
    rank.barrier();
    if (rank.index() != kOdd) {
      rank.expect_error(
          ErrorCode::kTimeout,
          {"of epoch 5", "rank 1 to begin this operation", "it has come to operation 4"},
          [&] { attempt(rank, buffer, exchange); });
    }
    rank.barrier();
    expect_recovery(rank, buffer, scenario);
  });
}

// Whatever differs is reported on every rank, with both values.
TEST(Recovery, AfterDifferentArguments) {
  const Shape usual = entangled();
  const Scenario scenario = make_scenario(usual);
  struct Case {
    std::function<void(Shape&)> change;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {[](Shape& shape) { shape.hidden = 128; }, {"hidden size", "128", "64"}},
      {[](Shape& shape) { shape.topk = 5; }, {"top-k", "5", "4"}},
      {[](Shape& shape) { shape.max_tokens = 16; }, {"max_tokens", "16", "8"}},
      {[](Shape& shape) { shape.format = Format::kFp8; }, {"format", "fp8", "bf16"}},
      {[](Shape& shape) { shape.layout = Layout::kPacked; }, {"layout", "packed", "padded"}},
      {[](Shape& shape) { shape.placement = Placement::kSlotted; },
       {"placement", "slotted", "packed"}},
  };
  std::vector<Scenario> odd;
  for (const Case& change : cases) {
    Shape shape = usual;
    change.change(shape);
    odd.push_back(make_scenario(shape));
  }
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    BufferOptions options = impatient(usual);
    options.max_tokens = 16;
    options.capacity_rows = 0;
    Buffer buffer(rank.communicator(), options);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      Exchange exchange(rank, rank.index() == kOdd ? odd[i] : scenario, buffer);
      rank.barrier();
      std::vector<std::string> words = cases[i].words;
      words.push_back("rank 1");
      const ErrorInfo info =
          rank.expect_error(ErrorCode::kMismatch, words, [&] { attempt(rank, buffer, exchange); });
      rank.expect(info.phase == Phase::kHeader, "phase");
      expect_recovery(rank, buffer, scenario);
    }
  });
}

TEST(Recovery, AfterDifferentOperations) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    Buffer buffer(rank.communicator(), impatient(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    exchange.provide_outputs(buffer);
    rank.expect_error(ErrorCode::kMismatch, {"rank 1", "calls dispatch", "calls combine"}, [&] {
      if (rank.index() == kOdd) {
        exchange.dispatch(buffer);
      } else {
        exchange.combine(buffer);
      }
      rank.settle(buffer);
    });
    expect_recovery(rank, buffer, scenario);
  });
}

// Held hooks are void, and handles stale, afterwards.
TEST(Recovery, LeavesNothingOfWhatWasBefore) {
  Shape shape = entangled();
  shape.placement = Placement::kSlotted;
  shape.hook = true;
  const Scenario scenario = make_scenario(shape);
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    Buffer buffer(rank.communicator(), impatient(shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
    const DispatchHandle done = exchange.result().handle;
    exchange.dispatch(buffer);
    const Hook held = exchange.result().hook;
    rank.barrier();
    expect_recovery(rank, buffer, scenario);
    rank.expect_error(ErrorCode::kOrder, {}, [&] { held(); });
    rank.expect_error(ErrorCode::kStaleHandle, {}, [&] {
      static_cast<void>(buffer.next_combine_buffer(done, DType::kBFloat16));
    });
    rank.barrier();  // or a fast rank's recovery would end the others' operations
    expect_recovery(rank, buffer, scenario);
  });
}

TEST(Recovery, OfOneRankAlone) {
  const Scenario scenario = make_scenario({.num_ranks = 1});
  run_ranks(1, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), impatient(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
    expect_recovery(rank, buffer, scenario);
  });
}

}  // namespace
}  // namespace tandem::test
