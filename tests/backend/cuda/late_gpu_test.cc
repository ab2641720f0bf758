// Ranks on one GPU that miss the timeout while others wait in kernels: those go on without them in
// the same operation, under replayed graphs too; whatever a late rank launches writes nothing.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "backend/cuda/gpu_support.h"
#include "backend/cuda/occupation.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

BufferOptions masking(const Shape& shape, std::chrono::nanoseconds timeout) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  options.timeout = with_patience(timeout);
  options.first_epoch = 0xfffffffaU;  // the wrap falls into the middle
  return options;
}

// It stops replaying, is masked in that very operation, replays on without doing any harm, learns
// what has become of it, and comes back: all while the others do nothing but replay.
TEST(CudaLateRanks, AreMaskedUnderReplays) {
  for (const Shape& shape : entangled_shapes()) {
    const auto [all, rest] = with_and_without(shape, kVictim);
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), masking(shape, 1s));
      const Stream stream;
      Pair pair(rank, all, buffer);
      Replay replay(pair, stream, shape.hook);
      rank.barrier();
      replay.run();
      expect_as(all, rank, pair, replay, "before");
      rank.barrier();
      for (int turn = 0; turn < 2; ++turn) {
        if (rank.index() != kVictim) {
          for (int i = 0; i < 3; ++i) {
            pair.spoil();
            replay.run();
            expect_as(rest, rank, pair, replay, "without the late rank");
            rank.expect(!replay.result().handle.active()[kVictim], "the handle says so");
          }
          buffer.check();
          const std::optional<Error> loss = buffer.last_loss();
          rank.expect(loss && loss->peer() == kVictim && loss->code() == ErrorCode::kTimeout,
                      "the loss names the late rank");
        }
        rank.barrier();
        if (rank.index() == kVictim) {
          for (int i = 0; i < 3; ++i) replay.run();
          rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked", "waited for rank 1"},
                            [&] { buffer.check(); });
        }
        rank.barrier();
        if (rank.index() != kVictim) expect_as(rest, rank, pair, replay, "as it was");
        rank.barrier();
        let_victim_in(rank, buffer);
        rank.barrier();
        if (rank.index() != kVictim) {
          for (int i = 0; i < 2; ++i) replay.run();
          expect_as(rest, rank, pair, replay, "before it is let in");
        }
        rank.barrier();
        for (int i = 0; i < 3; ++i) {
          pair.spoil();
          replay.run();
          expect_as(all, rank, pair, replay, "with it again");
          rank.expect(replay.result().handle.active()[kVictim], "and the handle says so");
        }
        rank.barrier();
      }
      buffer.check();
      rank.barrier();
    });
  }
}

// As small as it can be, and each call by itself: what a sanitizer can be set on.
TEST(CudaLateRanks, OneOfTwoIsMasked) {
  Shape shape = entangled_three();
  shape.num_ranks = 2;
  shape.tokens.pop_back();
  const auto [all, rest] = with_and_without(shape, kVictim);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), masking(shape, 300ms));
    const Stream stream;
    Pair pair(rank, all, buffer);
    const auto run = [&](const Scenario& expected, const char* when) {
      const DispatchResult result = pair.run(stream, false);
      stream.synchronise();
      const std::string report = pair.compare(result, expected);
      rank.expect(report.empty(), std::string(when) + ": " + report);
    };
    run(all, "before");
    rank.barrier();
    if (rank.index() != kVictim) {
      for (int i = 0; i < 3; ++i) run(rest, "without the late rank");
      rank.expect(buffer.last_loss().has_value(), "it has been missed");
    }
    rank.barrier();
    if (rank.index() == kVictim) {
      rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked"}, [&] {
        run(all, "never");
        buffer.check();
      });
    }
    rank.barrier();
  });
}

// Rows of the victim that are announced, and do not come: zeros of token -1. Their experts' outputs
// weigh nothing, as the victim misses the combine.
void expect_without_rows_of(int victim, const Scenario& all, Rank& rank,
                            const DispatchResult& result) {
  Scenario expected = all;
  reference::RankOutput& mine = expected.received[rank.index()];
  const auto tokens = download_as<std::int32_t>(result.source_tokens, rank.stream());
  const auto values = download_as<std::uint16_t>(result.x, rank.stream());
  for (std::int64_t row = 0; row < mine.num_rows; ++row) {
    if (mine.source_ranks[row] != victim) continue;
    rank.expect_equal(tokens[row], -1, "source token of a row that did not come");
    for (int channel = 0; channel < all.shape.hidden; ++channel) {
      rank.expect_equal(values[row * all.shape.hidden + channel], 0, "channel of such a row");
    }
    mine.source_tokens[row] = -1;
  }
  const std::string report = compare_received(expected, rank.index(), result, rank.stream());
  rank.expect(report.empty(), report);
}

// One block of the victim's kernel has announced its rows and written its part of them; the other
// finds no multiprocessor until all is over. The others count all rows in, since some of them may
// have ended the operation so; what did not come is zeros, and when the late block starts it writes
// nothing.
TEST(CudaLateRanks, BlockThatStartsTooLateWritesNothing) {
  constexpr int kBlocks = 2;  // of each rank's kernels
  // Nobody tells when a launch has reached the multiprocessors, or waits for one of them. Long, in
  // case programs take turns on the GPU.
  constexpr auto kQueued = 100ms;
  const Shape shape = entangled_three();
  const Scenario all = make_scenario(shape);
  int num_sms = 0;
  require_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0),
               "cudaDeviceGetAttribute");
  std::unique_ptr<Occupation> most;
  std::unique_ptr<Occupation> for_rank_0;
  std::unique_ptr<Occupation> instead;
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    BufferOptions options = masking(shape, 1s);
    options.num_sms = kBlocks;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, all, buffer);
    rank.run_freely();
    DispatchOptions call = exchange.dispatch_options();
    DispatchResult result;
    const cudaStream_t urgent = rank.index() == 0 ? make_urgent_stream() : nullptr;
    if (rank.index() == 0) call.stream = urgent;
    rank.barrier();
    if (rank.index() == 0) {
      for_rank_0 = std::make_unique<Occupation>(kBlocks);
      most = std::make_unique<Occupation>(num_sms - kBlocks - (kBlocks + 1));
      most->await_start();
      for_rank_0->await_start();
    }
    rank.barrier();
    // Rank 2 has both of its blocks; the victim's first takes the multiprocessor that is left, and
    // waits for rank 0.
    const auto dispatch = [&](int whose) {
      if (rank.index() == whose) result = buffer.dispatch(exchange.x(), exchange.topk_idx(), call);
      std::this_thread::sleep_for(kQueued);
      rank.barrier();
    };
    dispatch(2);
    dispatch(kVictim);
    dispatch(0);
    // Whatever becomes free from now on is taken first by rank 0, then by these.
    if (rank.index() == 0) {
      instead = std::make_unique<Occupation>(3 * kBlocks);
      std::this_thread::sleep_for(kQueued);
      for_rank_0->release();
    }
    if (rank.index() != kVictim) {
      const std::vector<bool> active = result.handle.active();
      rank.expect(active[0] && !active[kVictim] && active[2], "the victim is not there");
      expect_without_rows_of(kVictim, all, rank, result);
    }
    rank.barrier();
    if (rank.index() == 0) {
      instead->release();
      most->release();
    }
    if (rank.index() == kVictim) {
      rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked"},
                        [&] { rank.settle(buffer); });
    }
    rank.barrier();
    if (rank.index() != kVictim) expect_without_rows_of(kVictim, all, rank, result);
    if (urgent != nullptr) (void)cudaStreamDestroy(urgent);
    rank.barrier();
  });
}

// A rank that calls something else does not have to be waited for: all learn it at once, though
// nobody calls into the library any more.
TEST(CudaLateRanks, MismatchReachesAllWhileTheyWait) {
  const Scenario scenario = make_scenario(entangled_three());
  run_ranks(3, [&](Rank& rank) {
    BufferOptions options = masking(scenario.shape, 10s);
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    DispatchOptions call = exchange.dispatch_options();
    if (rank.index() == kVictim) call.layout = Layout::kPacked;
    rank.run_freely();
    rank.barrier();
    const auto start = std::chrono::steady_clock::now();
    rank.expect_error(ErrorCode::kMismatch, {"layout"}, [&] {
      buffer.dispatch(exchange.x(), exchange.topk_idx(), call);
      rank.settle(buffer);
    });
    rank.expect(std::chrono::steady_clock::now() - start < 9s, "before the timeout");
    rank.barrier();
    const std::vector<bool> active = buffer.recover();
    rank.expect(active[0] && active[1] && active[2], "all are there");
    rank.barrier();
    exchange.run(buffer);
    rank.barrier();
  });
}

TEST(CudaDoors, AreRefusedWithAReason) {
  const Shape shape = entangled_three();
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    BufferOptions options = masking(shape, 1s);
    options.door = "late_gpu_test";
    rank.expect_error(ErrorCode::kUnsupported, {"threads of one process", "processes can"},
                      [&] { Buffer buffer(rank.communicator(), options); });
    options.on_timeout = OnTimeout::kFail;
    rank.expect_error(ErrorCode::kUnsupported, {"on_timeout mask"},
                      [&] { Buffer buffer(rank.communicator(), options); });
  });
}

}  // namespace
}  // namespace tandem::test
