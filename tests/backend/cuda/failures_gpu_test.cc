// What goes wrong on a GPU: a peer that never comes is named through memory that the host can read
// at any time; the context lives on; wrong indices write nothing out of bounds.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::nanoseconds kLimit = 300ms;
constexpr int kStalled = 1;

// Every rank needs every other.
Shape entangled() {
  return {.num_ranks = 3, .num_experts = 3, .topk = 3, .routing = Routing::kFull};
}

// Asks until an error comes, as a scheduler would between its steps. Never waits for the device.
void poll(Buffer& buffer) {
  const Clock::time_point deadline = Clock::now() + 10s;
  while (Clock::now() < deadline) {
    buffer.check();
    std::this_thread::sleep_for(1ms);
  }
}

void expect_stall(Rank& rank, Phase phase, Operation operation, const std::function<void()>& call) {
  const Clock::time_point begin = Clock::now();
  const ErrorInfo info =
      rank.expect_error(ErrorCode::kTimeout, {"rank " + std::to_string(kStalled)}, call);
  rank.expect_equal(info.peer, kStalled, "peer");
  rank.expect_equal(name(info.operation), name(operation), "operation");
  rank.expect_equal(name(info.phase), name(phase), "phase");
  rank.expect_equal(info.limit.count(), kLimit.count(), "limit");
  rank.expect(info.epoch > 0, "no epoch in the error");
  rank.expect(info.waited >= kLimit, "waited less than the limit");
  rank.expect(Clock::now() - begin < 5s, "the error took far longer than the limit");
}

void expect_life_goes_on(Rank& rank, const Scenario& scenario) {
  rank.barrier();
  int devices = 0;
  require_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  rank.barrier();
  Buffer buffer(rank.communicator(), options_for(scenario.shape));
  Exchange exchange(rank, scenario, buffer);
  exchange.run(buffer);
  rank.barrier();
}

// Report: a trap in a kernel became a sticky error, blamed on the next launch. `replayed`: the
// operation is in a graph, so that no call of this library stands beside it.
void stall_a_dispatch(bool replayed) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    {
      BufferOptions options = options_for(scenario.shape);
      options.timeout = kLimit;
      Buffer buffer(rank.communicator(), options);
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      std::unique_ptr<Graph> graph;
      if (replayed) {
        graph = std::make_unique<Graph>(stream, [&] { pair.run(stream, false); });
      }
      rank.barrier();
      if (rank.index() != kStalled) {
        expect_stall(rank, Phase::kHeader, Operation::kDispatch, [&] {
          if (replayed) {
            graph->launch(stream);
          } else {
            pair.dispatch(stream);
          }
          poll(buffer);
        });
        rank.expect_error(ErrorCode::kFailedBuffer, {"rank 1"}, [&] { pair.dispatch(stream); });
        rank.expect_error(ErrorCode::kFailedBuffer, {"rank 1"}, [&] { buffer.check(); });
        stream.synchronise();
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

TEST(CudaFailures, CheckNamesAStalledPeerWithoutSynchronising) { stall_a_dispatch(false); }

TEST(CudaFailures, CheckNamesAStalledPeerOfAReplay) { stall_a_dispatch(true); }

TEST(CudaFailures, NextCallReportsAStalledCombine) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    {
      BufferOptions options = options_for(scenario.shape);
      options.timeout = kLimit;
      Buffer buffer(rank.communicator(), options);
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      rank.barrier();
      const DispatchResult result = pair.dispatch(stream);
      rank.barrier();
      stream.synchronise();
      rank.barrier();
      if (rank.index() != kStalled) {
        expect_stall(rank, Phase::kReady, Operation::kCombine, [&] {
          pair.combine(stream, result, false);
          stream.synchronise();
          pair.dispatch(stream);
        });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// Operations queued behind one that failed end at once: teardown needs no second timeout.
TEST(CudaFailures, WhatIsQueuedBehindAFailureEndsAtOnce) {
  const Scenario scenario = make_scenario(entangled());
  run_ranks(3, [&](Rank& rank) {
    {
      BufferOptions options = options_for(scenario.shape);
      options.timeout = kLimit;
      Buffer buffer(rank.communicator(), options);
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      rank.barrier();
      if (rank.index() != kStalled) {
        const Clock::time_point begin = Clock::now();
        for (int i = 0; i < 20; ++i) pair.run(stream, false);
        stream.synchronise();
        rank.expect(Clock::now() - begin < 10 * kLimit, "20 pairs waited one after the other");
        rank.expect_error(ErrorCode::kTimeout, {"rank 1"}, [&] { buffer.check(); });
      }
      rank.barrier();
    }
    expect_life_goes_on(rank, scenario);
  });
}

// An index beyond the experts, seen on the device alone: refused by a typed error on the rank that
// gave it, taken as none by all, and the buffer goes on.
TEST(CudaFailures, IndexBeyondTheExpertsIsNamedAndWritesNothing) {
  for (const bool replayed : {false, true}) {
    Shape shape{.num_ranks = 2, .num_experts = 8, .topk = 2, .routing = Routing::kFull};
    reference::Problem right = make_problem(shape);
    right.ranks[0].topk_idx[5] = -1;
    const Scenario as_none = solve(shape, right);
    Scenario wrong = as_none;
    wrong.problem.ranks[0].topk_idx[5] = 4711;
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      const Stream stream;
      Pair pair(rank, wrong, buffer);
      Pair sound(rank, as_none, buffer);
      DispatchResult result;
      std::unique_ptr<Graph> graph;
      if (replayed) {
        graph = std::make_unique<Graph>(stream, [&] { result = pair.run(stream, false); });
      }
      rank.barrier();
      if (replayed) {
        graph->launch(stream);
      } else {
        result = pair.dispatch(stream);
      }
      rank.barrier();
      stream.synchronise();
      if (rank.index() == 0) {
        rank.expect_error(ErrorCode::kInvalidArgument, {"topk_idx[2, 1]", "4711", "8"},
                          [&] { buffer.check(); });
      }
      rank.barrier();
      const std::string report = compare_received(as_none, rank.index(), result, rank.stream());
      rank.expect(report.empty(), report);
      rank.barrier();
      const DispatchResult next = sound.run(stream, true);
      rank.barrier();
      stream.synchronise();
      buffer.check();
      const std::string later = sound.compare(next);
      rank.expect(later.empty(), later);
      rank.barrier();
    });
  }
}

}  // namespace
}  // namespace tandem::test
