// Waits that end badly: a stalled or absent rank, ranks that call different things. Every peer gets
// a bounded error that says where it stood and whom it missed, and the process goes on.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/exchange.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::nanoseconds kLimit = 1500ms;
constexpr int kStalled = 1;

// Every rank needs every other: all experts for every token.
Shape entangled(int num_ranks) {
  return {.num_ranks = num_ranks,
          .num_experts = num_ranks,
          .topk = num_ranks,
          .routing = Routing::kFull};
}

// The same in steps in each of which what all wait for has been sent before anybody waits.
Shape in_steps(int num_ranks) {
  Shape shape = entangled(num_ranks);
  shape.placement = Placement::kSlotted;
  shape.hook = true;
  return shape;
}

BufferOptions impatient(const Shape& shape) {
  BufferOptions options = options_for(shape);
  options.timeout = kLimit;
  return options;
}

// One rank is impatient, and misses the stalled one first of all, whoever else is late. (On GPUs
// each rank's kernels are to end by themselves.)
BufferOptions impatient(const Shape& shape, const Rank& rank) {
  const bool waits = rank.index() == 0 || backend_under_test() == Backend::kCuda;
  return waits ? impatient(shape) : options_for(shape);
}

void dispatch_in_steps(Rank& rank, Exchange& exchange, Buffer& buffer) {
  exchange.dispatch(buffer);
  rank.barrier();
  exchange.finish_dispatch();
  rank.barrier();
}

void combine_in_steps(Rank& rank, Exchange& exchange, Buffer& buffer) {
  exchange.provide_outputs(buffer);
  exchange.combine(buffer);
  rank.barrier();
  exchange.finish_combine();
  rank.barrier();
}

void expect_stall(Rank& rank, Buffer& buffer, Operation operation, Phase phase,
                  const std::function<void()>& call) {
  const ErrorInfo info = rank.expect_error(
      ErrorCode::kTimeout,
      {std::string(name(operation)), std::string(name(phase)), std::to_string(kStalled)}, [&] {
        call();
        rank.settle(buffer);
      });
  rank.expect_equal(name(info.operation), name(operation), "operation");
  rank.expect_equal(name(info.phase), name(phase), "phase");
  rank.expect_equal(info.peer, kStalled, "peer");
  rank.expect_equal(info.limit.count(), kLimit.count(), "limit");
  rank.expect(info.waited >= kLimit, "waited less than the limit");
  rank.expect(info.waited < options_for(Shape{}).timeout, "waited far longer than the limit");
}

// After a failure, a new buffer on the same communicator works.
void expect_life_goes_on(Rank& rank, const Scenario& scenario) {
  rank.barrier();
  Buffer buffer(rank.communicator(), options_for(scenario.shape));
  Exchange exchange(rank, scenario, buffer);
  exchange.run(buffer);
}

// Report: a rank that never came made its peers trap, and the error was blamed on the next launch.
TEST(Waiting, StalledDispatchNamesTheRankThatIsMissing) {
  const Scenario scenario = make_scenario(entangled(3));
  run_ranks(3, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(scenario.shape, rank));
      Exchange exchange(rank, scenario, buffer);
      rank.barrier();
      if (rank.index() != kStalled) {
        expect_stall(rank, buffer, Operation::kDispatch, Phase::kHeader, [&] {
          buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
        });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// The send of a hook does not wait; the hook does.
TEST(Waiting, StalledHookNamesTheRankThatIsMissing) {
  const Shape shape = in_steps(3);
  const Scenario scenario = make_scenario(shape);
  run_ranks(3, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(shape));
      Exchange exchange(rank, scenario, buffer);
      rank.barrier();
      DispatchResult result;
      if (rank.index() != kStalled) {
        result = buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
      }
      rank.barrier();
      if (rank.index() != kStalled) {
        expect_stall(rank, buffer, Operation::kDispatch, Phase::kHeader, [&] { result.hook(); });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

TEST(Waiting, StalledCombineNamesTheRankThatIsMissing) {
  const Scenario scenario = make_scenario(in_steps(3));
  run_ranks(3, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(scenario.shape, rank));
      Exchange exchange(rank, scenario, buffer);
      dispatch_in_steps(rank, exchange, buffer);
      if (rank.index() != kStalled) {
        expect_stall(rank, buffer, Operation::kCombine, Phase::kReady, [&] {
          CombineOptions options = exchange.combine_options();
          options.return_hook = false;
          buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                         exchange.out(), options);
        });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// A rank that has sent but reads nothing: peers may be two operations ahead of it, not three.
TEST(Waiting, RankThatDoesNotReceiveIsNamedTwoOperationsLater) {
  const Shape shape = in_steps(2);
  const Scenario scenario = make_scenario(shape);
  run_ranks(2, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(shape));
      Exchange exchange(rank, scenario, buffer);
      rank.barrier();
      const auto send = [&] {
        return buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
      };
      const DispatchResult first = send();
      const DispatchResult second = send();
      rank.barrier();
      if (rank.index() != kStalled) {
        first.hook();
        second.hook();
        expect_stall(rank, buffer, Operation::kDispatch, Phase::kEnter, [&] { send(); });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// Report: after a timeout only killing the process helped. Every later call says what happened.
TEST(Waiting, FailedBufferRepeatsItsErrorAndCanBeDestroyed) {
  constexpr int kRounds = 20;
  const Scenario scenario = make_scenario(in_steps(2));
  run_ranks(2, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(scenario.shape));
      Exchange exchange(rank, scenario, buffer);
      dispatch_in_steps(rank, exchange, buffer);
      if (rank.index() != kStalled) {
        const auto dispatch = [&] {
          DispatchOptions options = exchange.dispatch_options();
          options.return_hook = false;
          buffer.dispatch(exchange.x(), exchange.topk_idx(), options);
          rank.settle(buffer);
        };
        const std::string culprit = "rank " + std::to_string(kStalled);
        rank.expect_error(ErrorCode::kTimeout, {culprit}, dispatch);
        const auto start = std::chrono::steady_clock::now();
        for (int round = 0; round < kRounds; ++round) {
          rank.expect_error(ErrorCode::kFailedBuffer, {"dispatch", culprit}, dispatch);
          rank.expect_error(ErrorCode::kFailedBuffer, {"dispatch", culprit}, [&] {
            buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                           exchange.out(), exchange.combine_options());
          });
          rank.expect_error(ErrorCode::kFailedBuffer, {"dispatch", culprit}, [&] {
            static_cast<void>(
                buffer.next_combine_buffer(exchange.result().handle, DType::kBFloat16));
          });
          const ErrorInfo info = rank.expect_error(ErrorCode::kFailedBuffer, {"dispatch", culprit},
                                                   [&] { buffer.check(); });
          rank.expect_equal(info.peer, kStalled, "peer of the repeated error");
        }
        // A call that waits would do so in every round.
        rank.expect(std::chrono::steady_clock::now() - start < kRounds * kLimit,
                    "a failed buffer waited again");
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// Report: one rank made one call fewer, and the others hung.
TEST(Waiting, RankThatMakesOneCallFewerIsNamed) {
  const Scenario scenario = make_scenario(in_steps(3));
  run_ranks(3, [&](Rank& rank) {
    {
      Buffer buffer(rank.communicator(), impatient(scenario.shape, rank));
      Exchange exchange(rank, scenario, buffer);
      for (int repetition = 0; repetition < 3; ++repetition) {
        dispatch_in_steps(rank, exchange, buffer);
        exchange.check_received();
        combine_in_steps(rank, exchange, buffer);
        exchange.check_combined();
      }
      if (rank.index() != kStalled) {
        const ErrorInfo info = rank.expect_error(ErrorCode::kTimeout, {"waited for"}, [&] {
          DispatchOptions options = exchange.dispatch_options();
          options.return_hook = false;
          buffer.dispatch(exchange.x(), exchange.topk_idx(), options);
          rank.settle(buffer);
        });
        rank.expect_equal(info.peer, kStalled, "peer");
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// One rank combines where the other dispatches: both are told, with the other's name, at once.
TEST(Waiting, DifferentOperationsAreAMismatchThatNamesTheRank) {
  const Scenario scenario = make_scenario(entangled(2));
  run_ranks(2, [&](Rank& rank) {
    {
      BufferOptions options = options_for(scenario.shape);
      options.timeout = BufferOptions::kForever;  // which tells nobody
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenario, buffer);
      exchange.dispatch(buffer);
      rank.barrier();
      const int other = 1 - rank.index();
      const ErrorInfo info = rank.expect_error(
          ErrorCode::kMismatch, {"dispatch", "combine", "rank " + std::to_string(other)}, [&] {
            if (rank.index() == 0) {
              buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
            } else {
              buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                             exchange.out(), exchange.combine_options());
            }
            rank.settle(buffer);
          });
      // Each finds the other to call something else; what one of them says first, both may be told.
      rank.expect(info.peer == 0 || info.peer == 1, "peer is one of the two");
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// Ranks call with one argument different: all are told, with both values.
TEST(Waiting, DifferentArgumentsAreAMismatchWithBothValues) {
  struct Case {
    Shape shapes[2];  // by rank
    std::vector<std::string> fragments;
  };
  const Shape base{.hidden = 64, .topk = 2, .max_tokens = 8};
  const auto changed = [](Shape shape, auto change) {
    change(shape);
    return shape;
  };
  std::vector<Case> cases = {
      {{base, changed(base, [](Shape& s) { s.hidden = 48; })}, {"64", "48"}},
      {{base, changed(base, [](Shape& s) { s.topk = 3; })}, {"2", "3"}},
      {{base, changed(base, [](Shape& s) { s.max_tokens = 16; })}, {"8", "16"}},
      {{base, changed(base, [](Shape& s) { s.format = Format::kFp8; })}, {"bf16", "fp8"}},
      {{base, changed(base, [](Shape& s) { s.format = Format::kFloat16; })}, {"bf16", "fp16"}},
      {{base, changed(base, [](Shape& s) { s.placement = Placement::kSlotted; })},
       {"packed", "slotted"}},
      {{base, changed(base, [](Shape& s) { s.layout = Layout::kPacked; })}, {"padded", "packed"}},
  };
  const Shape aligned = changed(base, [](Shape& s) {
    s.layout = Layout::kPacked;
    s.row_alignment = 4;
  });
  cases.push_back(
      {{aligned, changed(aligned, [](Shape& s) { s.row_alignment = 16; })}, {"4", "16"}});
  for (const Case& difference : cases) {
    const std::vector<Shape> shapes(std::begin(difference.shapes), std::end(difference.shapes));
    const std::vector<Scenario> scenarios = make_scenarios(shapes);
    SCOPED_TRACE(::testing::PrintToString(difference.fragments));
    run_ranks(2, [&](Rank& rank) {
      BufferOptions options = options_for(shapes);
      options.packed_placement = options.slotted_placement = options.padded_layout = true;
      options.timeout = BufferOptions::kForever;  // which tells nobody
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenarios[rank.index()], buffer);
      rank.barrier();
      std::vector<std::string> fragments = difference.fragments;
      fragments.push_back("rank " + std::to_string(1 - rank.index()));
      rank.expect_error(ErrorCode::kMismatch, fragments, [&] {
        buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
        rank.settle(buffer);
      });
      rank.barrier();
    });
  }
}

// Combines of different dispatches, and of different types.
TEST(Waiting, CombinesThatDoNotBelongTogetherAreAMismatch) {
  const Shape shape = entangled(2);
  Shape narrow = shape;
  narrow.combine_dtype = DType::kFloat16;
  const std::vector<Scenario> scenarios = make_scenarios({shape, narrow});
  for (const bool types : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      Exchange a(rank, scenarios[types ? rank.index() : 0], buffer);
      Exchange b(rank, scenarios[0], buffer);
      a.dispatch(buffer);
      b.dispatch(buffer);
      rank.barrier();
      Exchange& chosen = types || rank.index() == 0 ? a : b;
      rank.expect_error(
          ErrorCode::kMismatch, {"combine", "rank " + std::to_string(1 - rank.index())}, [&] {
            buffer.combine(chosen.staged_y(), chosen.topk_weights(), chosen.result().handle,
                           chosen.out(), chosen.combine_options());
            rank.settle(buffer);
          });
      rank.barrier();
    });
  }
}

// Report: buffers made for different numbers of tokens hung in their first call. Refused when they
// are made, on all ranks, without waiting for anything, naming rank and values.
TEST(Waiting, BuffersMadeForDifferentShapesAreRefusedOnAllRanks) {
  const Shape shape{.num_ranks = 3, .max_tokens = 64};
  const std::vector<std::pair<std::function<void(BufferOptions&)>, std::vector<std::string>>>
      cases = {
          {[](BufferOptions& o) { o.max_tokens = 32; }, {"max_tokens", "64", "32"}},
          {[](BufferOptions& o) { o.max_hidden = 72; }, {"max_hidden", "64", "72"}},
          {[](BufferOptions& o) { o.max_topk = 3; }, {"max_topk", "2", "3"}},
          {[](BufferOptions& o) { o.num_experts = 9; }, {"num_experts", "8", "9"}},
          {[](BufferOptions& o) { o.capacity_rows = 777; }, {"capacity_rows", "777"}},
          {[](BufferOptions& o) { o.widest_format = Format::kFloat32; }, {"widest_format", "fp32"}},
          {[](BufferOptions& o) { o.slotted_placement = true; }, {"slotted_placement"}},
          {[](BufferOptions& o) { o.expert_owners = {2, 2, 2, 2, 2, 2, 2, 0}; }, {"expert_owners"}},
      };
  run_ranks(3, [&](Rank& rank) {
    for (const auto& [change, fragments] : cases) {
      BufferOptions options = options_for(shape);
      if (rank.index() == 2) change(options);
      std::vector<std::string> all = fragments;
      all.push_back("rank 2");
      const auto start = std::chrono::steady_clock::now();
      rank.expect_error(ErrorCode::kMismatch, all, [&] { Buffer(rank.communicator(), options); });
      rank.expect(std::chrono::steady_clock::now() - start < WorldOptions().setup_timeout,
                  "told by a timeout");
    }
    // What may differ does not matter.
    BufferOptions options = options_for(shape);
    options.num_threads = 1 + rank.index();
    options.timeout = 10s + rank.index() * 1s;
    const Buffer buffer(rank.communicator(), options);
  });
}

// Report: making a buffer waited without end for a rank that never came.
TEST(Waiting, MakingABufferIsBoundedAndNamesTheMissingRank) {
  const Shared<std::atomic<int>> num_told;
  run_ranks(3,
            [&](Rank& rank) {
              rank.barrier();
              if (rank.index() == kStalled) {
                while (*num_told < 2) std::this_thread::sleep_for(1ms);
                return;
              }
              const auto start = std::chrono::steady_clock::now();
              rank.expect_error(ErrorCode::kTimeout, {"rank 1"},
                                [&] { Buffer(rank.communicator(), options_for(entangled(3))); });
              rank.expect(std::chrono::steady_clock::now() - start < 10s, "told late");
              ++*num_told;
            },
            {.setup_timeout = 3s});  // in which ranks meet before
}

// A rank that comes late harms nobody: peers wait, within their limit.
TEST(Waiting, LateRankIsWaitedFor) {
  Shape shape = entangled(3);
  shape.zero_copy = true;
  const Scenario scenario = make_scenario(shape);
  run_ranks(3, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    for (int repetition = 0; repetition < 3; ++repetition) {
      if (rank.index() == repetition) std::this_thread::sleep_for(60ms);
      exchange.run(buffer);
    }
  });
}

TEST(Waiting, LimitMayBeInfinite) {
  const Scenario scenario = make_scenario(entangled(2));
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.timeout = BufferOptions::kForever;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    if (rank.index() == 1) std::this_thread::sleep_for(30ms);
    exchange.run(buffer);
  });
}

}  // namespace
}  // namespace tandem::test
