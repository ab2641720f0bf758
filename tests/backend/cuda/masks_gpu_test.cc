// Ranks that are masked and found again under replayed graphs, where no call of this library stands
// beside an operation; failures that reach kernels at work; kernels of a rank that was left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

// Survivors do nothing but replay: the mask comes and goes between two of their launches.
TEST(CudaMasks, HoldUnderReplaysWithoutTheirHosts) {
  for (const Shape& shape : entangled_shapes()) {
    const auto [all, rest] = with_and_without(shape, kVictim);
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      BufferOptions options = options_for(shape);
      options.first_epoch = 0xfffffff4U;  // the wrap falls into the middle
      options.timeout = 10s;
      Buffer buffer(rank.communicator(), options);
      const Stream stream;
      Pair pair(rank, all, buffer);
      Replay replay(pair, stream, shape.hook);
      rank.barrier();
      replay.run();
      expect_as(all, rank, pair, replay, "before");
      rank.barrier();
      for (int turn = 0; turn < 2; ++turn) {
        if (rank.index() == 0) buffer.mask(kVictim);
        rank.barrier();
        for (int i = 0; i < 2; ++i) replay.run();  // until the mask holds
        expect_as(all, rank, pair, replay, "until the mask holds");
        rank.barrier();
        replay.run();
        if (rank.index() == kVictim) {
          rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked", "mask(1)"},
                            [&] { buffer.check(); });
        } else {
          expect_as(rest, rank, pair, replay, "masked");
        }
        rank.barrier();
        if (rank.index() != kVictim) replay.run();
        rank.barrier();
        let_victim_in(rank, buffer);
        rank.barrier();
        if (rank.index() != kVictim) {
          for (int i = 0; i < 2; ++i) {
            pair.spoil();
            replay.run();
            expect_as(rest, rank, pair, replay, "before it is let in");
          }
        }
        rank.barrier();
        for (int i = 0; i < 3; ++i) {
          pair.spoil();
          replay.run();
          expect_as(all, rank, pair, replay, "with the victim again");
          rank.expect(replay.result().handle.active()[kVictim], "and the handle says so");
        }
        rank.barrier();
      }
      buffer.check();
      rank.barrier();
    });
  }
}

// A rank that waits on its GPU for one that starts anew is told so there: it would be left behind
// if it waited for its own timeout.
TEST(CudaMasks, NewStartEndsKernelsThatWait) {
  const Scenario scenario = make_scenario(entangled_three());
  run_ranks(3, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.timeout = 20s;
    Buffer buffer(rank.communicator(), options);
    const Stream stream;
    Pair pair(rank, scenario, buffer);
    Replay replay(pair, stream, false);
    rank.barrier();
    replay.run();
    rank.barrier();
    for (int round = 0; round < 3; ++round) {
      if (rank.index() == 2) {
        replay.launch();
        replay.launch();
      }
      if (rank.index() == 1) pair.dispatch(stream);
      rank.barrier();
      if (rank.index() != 0) {
        stream.synchronise();
        rank.expect_error(ErrorCode::kFailedBuffer, {"rank 0 has called recover()"},
                          [&] { buffer.check(); });
      }
      const std::vector<bool> active = buffer.recover();
      rank.expect(active[0] && active[1] && active[2], "all are there");
      rank.barrier();
      pair.spoil();
      replay.run();
      expect_as(scenario, rank, pair, replay, "afterwards");
      rank.barrier();
    }
  });
}

// Left behind by the others, it launches what it had captured: that waits for nobody and writes
// nothing.
TEST(CudaMasks, RankThatWasLeftBehindWritesNothing) {
  const Scenario all = make_scenario(entangled_three());
  const Scenario rest = without(all, {kVictim});
  run_ranks(3, [&](Rank& rank) {
    BufferOptions options = options_for(all.shape);
    options.timeout = 300ms;
    Buffer buffer(rank.communicator(), options);
    const Stream stream;
    Pair pair(rank, all, buffer);
    Replay replay(pair, stream, false);
    rank.barrier();
    replay.run();
    rank.barrier();
    if (rank.index() != kVictim) {
      replay.run();
      rank.expect_error(ErrorCode::kTimeout, {"waited for rank 1"}, [&] { buffer.check(); });
      rank.expect(!buffer.recover()[kVictim], "the victim is left behind");
      replay.run();
    }
    rank.barrier();
    if (rank.index() == kVictim) {
      for (int i = 0; i < 3; ++i) replay.run();
      rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked"}, [&] { buffer.check(); });
    }
    rank.barrier();
    if (rank.index() != kVictim) {
      const auto received = compare_received(rest, rank.index(), replay.result(), rank.stream());
      rank.expect(received.empty(), received);
      for (int i = 0; i < 3; ++i) replay.run();
      buffer.check();
      const auto later = compare_received(rest, rank.index(), replay.result(), rank.stream());
      rank.expect(later.empty(), later);
    }
    rank.barrier();
  });
}

// A change of a rank must be past before the next one.
TEST(CudaMasks, RankIsNotMaskedWhileItIsBeingLetIn) {
  const Scenario scenario = make_scenario({.num_ranks = 2, .routing = Routing::kFull});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    const Stream stream;
    Pair pair(rank, scenario, buffer);
    Replay replay(pair, stream, false);
    rank.barrier();
    if (rank.index() == 0) buffer.mask(kVictim);
    rank.barrier();
    for (int i = 0; i < 2; ++i) replay.run();
    rank.barrier();
    if (rank.index() == kVictim) {
      rank.expect(buffer.recover()[kVictim], "it is back");
    } else {
      while (buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
      rank.expect_error(ErrorCode::kOrder, {"rank 1 is left out from operation 5"},
                        [&] { buffer.unmask(kVictim); });
      replay.run();
      buffer.unmask(kVictim);
      rank.expect_error(ErrorCode::kOrder, {"rank 1 is let in from operation 11"},
                        [&] { buffer.mask(kVictim); });
      for (int i = 0; i < 2; ++i) replay.run();
    }
    rank.barrier();
    replay.run();
    if (rank.index() == 0) buffer.mask(kVictim);
    rank.barrier();
    for (int i = 0; i < 2; ++i) replay.run();
    rank.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
