// Ranks as processes that share one GPU over CUDA IPC. First among the GPU tests: this process must
// not have touched the GPU when it forks.
#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

class CudaProcesses : public testing::Test {
 protected:
  void SetUp() override { setenv("TANDEM_TEST_LAUNCH", "processes", 1); }
  void TearDown() override { setenv("TANDEM_TEST_LAUNCH", "threads", 1); }
};

TEST_F(CudaProcesses, ExchangeOverInterProcessMemory) {
  std::vector<Shape> shapes;
  for (const bool hook : {false, true}) {
    for (const bool zero_copy : {false, true}) {
      Shape shape{.hidden = 1000, .topk = 4, .max_tokens = 16};
      shape.placement = hook ? Placement::kSlotted : Placement::kPacked;
      shape.hook = hook;
      shape.zero_copy = zero_copy;
      shape.format = zero_copy ? Format::kFp8 : Format::kBFloat16;
      shapes.push_back(shape);
    }
  }
  run_in_turn(shapes);
}

TEST_F(CudaProcesses, BuffersComeAndGo) {
  const Scenario scenario = make_scenario({.num_ranks = 2});
  run_ranks(2, [&](Rank& rank) {
    for (int round = 0; round < 4; ++round) {
      Buffer buffer(rank.communicator(), options_for(scenario.shape));
      Exchange exchange(rank, scenario, buffer);
      exchange.run(buffer);
    }
  });
}

TEST_F(CudaProcesses, StalledProcessIsNamedAndLifeGoesOn) {
  const Scenario scenario = make_scenario({.num_experts = 2, .topk = 2, .routing = Routing::kFull});
  run_ranks(2, [&](Rank& rank) {
    {
      BufferOptions options = options_for(scenario.shape);
      options.timeout = 1s;
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenario, buffer);
      rank.barrier();
      if (rank.index() == 0) {
        const ErrorInfo info = rank.expect_error(ErrorCode::kTimeout, {"dispatch", "rank 1"}, [&] {
          buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options());
          rank.settle(buffer);
        });
        rank.expect_equal(info.peer, 1, "peer");
      }
      rank.barrier();
    }
    rank.barrier();
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
  });
}

// Of whom the second is killed.
Shape three_processes() {
  return {.num_ranks = 3,
          .num_experts = 6,
          .hidden = 512,
          .topk = 4,
          .max_tokens = 16,
          .routing = Routing::kFull};
}

// A process that is killed in the middle of operations: the others learn whom they miss, go on
// without it after recover(), and stay right.
TEST_F(CudaProcesses, KilledProcessIsLeftBehind) {
  const Shape shape = three_processes();
  const Scenario all = make_scenario(shape);
  const Scenario rest = without(all, {1});
  run_ranks(3,
            [&](Rank& rank) {
              rank.run_freely();
              BufferOptions options = options_for(shape);
              options.timeout = 2s;
              Buffer buffer(rank.communicator(), options);
              Exchange exchange(rank, all, buffer);
              exchange.run(buffer);
              if (rank.index() == 1) {
                exchange.dispatch(buffer);
                rank.die();
              }
              const ErrorInfo info = rank.expect_error(ErrorCode::kTimeout, {"rank 1"}, [&] {
                for (int pair = 0; pair < 2; ++pair) {
                  exchange.dispatch(buffer);
                  rank.settle(buffer);
                  exchange.provide_outputs(buffer);
                  exchange.combine(buffer);
                  rank.settle(buffer);
                }
              });
              rank.expect_equal(info.peer, 1, "culprit");
              const std::vector<bool> active = buffer.recover();
              rank.expect(active[0] && !active[1] && active[2], "who is active");
              Exchange remaining(rank, rest, buffer);
              for (int pair = 0; pair < 3; ++pair) remaining.run(buffer);
            },
            {.may_die = {1}});
}

// The same where who is missed is masked: no operation fails.
TEST_F(CudaProcesses, KilledProcessIsMaskedInThatStep) {
  const Shape shape = three_processes();
  const Scenario all = make_scenario(shape);
  const Scenario rest = without(all, {1});
  run_ranks(3,
            [&](Rank& rank) {
              rank.run_freely();
              BufferOptions options = options_for(shape);
              options.timeout = 5s;
              options.on_timeout = OnTimeout::kMask;
              Buffer buffer(rank.communicator(), options);
              Exchange exchange(rank, all, buffer);
              Exchange remaining(rank, rest, buffer);
              exchange.run(buffer);
              if (rank.index() == 1) rank.die();
              for (int pair = 0; pair < 3; ++pair) {
                remaining.run(buffer);
                rank.expect(!remaining.result().handle.active()[1], "the handle says so");
              }
              buffer.check();
              const std::optional<Error> loss = buffer.last_loss();
              rank.expect(loss && loss->code() == ErrorCode::kPeerLost && loss->peer() == 1,
                          "why it is missed");
            },
            {.may_die = {1}});
}

// Becomes rank 1 of the others' buffer once its process has gone, and runs pairs with them.
void replace_rank_1(Rank& everyone, const Scenario& all, const BufferOptions& options, int pairs) {
  Rank rank(everyone.communicator(), 1);
  rank.run_freely();
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      Buffer buffer = Buffer::join(1, options);
      const Stream stream;
      Pair pair(rank, all, buffer);
      for (int i = 0; i < pairs; ++i) {
        const DispatchResult result = pair.dispatch(stream);
        pair.combine(stream, result, false);
        stream.synchronise();
        const std::string report = pair.compare(result);
        everyone.expect(report.empty(), "the newcomer: " + report);
      }
      return;
    } catch (const Error& error) {
      // Its predecessor is still there.
      if (error.code() != ErrorCode::kOrder || std::chrono::steady_clock::now() - start > 30s) {
        throw;
      }
      std::this_thread::sleep_for(1ms);
    }
  }
}

// A graph that was captured with one process goes on with another that takes its place: blocks are
// looked up when kernels start.
TEST_F(CudaProcesses, GraphGoesOnWithTheProcessThatReplacesAnother) {
  constexpr int kPairs = 3;
  const Shape shape{.num_ranks = 2,
                    .num_experts = 5,
                    .hidden = 1000,
                    .topk = 4,
                    .max_tokens = 16,
                    .routing = Routing::kFull};
  const auto [all, rest] = with_and_without(shape, 1);
  const std::string door = "processes_gpu_test_" + std::to_string(::getpid());
  run_ranks(3, [&](Rank& everyone) {
    BufferOptions options = options_for(shape);
    options.on_timeout = OnTimeout::kMask;
    options.timeout = 5s;
    options.door = door;
    if (everyone.index() == 2) return replace_rank_1(everyone, all, options, kPairs);
    Rank rank(Communicator::connect(door, everyone.index(), 2));
    rank.run_freely();
    Buffer buffer(rank.communicator(), options);
    const Stream stream;
    Pair pair(rank, all, buffer);
    Replay replay(pair, stream, false);
    replay.run();
    const std::string before = pair.compare(replay.result());
    everyone.expect(before.empty(), "before: " + before);
    if (rank.index() == 1) return;
    int together = 0;
    bool was_away = false;
    const auto start = std::chrono::steady_clock::now();
    while (together < kPairs && std::chrono::steady_clock::now() - start < 30s) {
      if (was_away && !buffer.waiting().empty()) {
        try {
          buffer.unmask(1);
        } catch (const Error& error) {
          everyone.expect(error.code() == ErrorCode::kOrder, error.what());  // masked just now
        }
      }
      pair.spoil();
      replay.run();
      const bool is_there = replay.result().handle.active()[1];
      const Scenario& expected = is_there ? all : rest;
      const std::string report =
          compare_received(expected, 0, replay.result(), rank.stream()) +
          compare_combined(expected, 0, pair.exchange().out(), rank.stream());
      everyone.expect(report.empty(), report);
      was_away = was_away || !is_there;
      together += is_there ? 1 : 0;
    }
    everyone.expect_equal(together, kPairs, "pairs with the newcomer");
  });
}

}  // namespace
}  // namespace tandem::test
