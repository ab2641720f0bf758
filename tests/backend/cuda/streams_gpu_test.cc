// Streams and events: what is queued behind an operation sees its result, whichever stream it is
// on, without a wait of the host, however late the peers are.
#include <gtest/gtest.h>

#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

class Event {
 public:
  Event() {
    require_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream) const {
    require_cuda(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  void hold_up(const Stream& stream) const {
    require_cuda(cudaStreamWaitEvent(stream.get(), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// A copy of received rows that the stream makes behind the operation.
class Snapshot {
 public:
  explicit Snapshot(const TensorView& rows)
      : bytes_(rows.num_elements() * size_of(rows.dtype)),
        array_(Backend::kCuda, rows.dtype, {rows.num_elements()}) {}

  void take(const TensorView& rows, const Stream& stream) const {
    require_cuda(cudaMemcpyAsync(array_.view().data, rows.data, static_cast<std::size_t>(bytes_),
                                 cudaMemcpyDeviceToDevice, stream.get()),
                 "cudaMemcpyAsync");
  }

  // The result as it would be if its rows lay here.
  [[nodiscard]] DispatchResult of(DispatchResult result) const {
    result.x.data = array_.view().data;
    return result;
  }

 private:
  std::int64_t bytes_;
  Array array_;
};

// The late rank launches this much after its peer, which meanwhile has queued all it has to.
constexpr std::chrono::milliseconds kLate = 30ms;

Shape fit_to_copy(bool hook) {
  // Rows of 512 bytes: pitch and width agree, so that one copy takes a view.
  Shape shape{.num_ranks = 2, .hidden = 256, .topk = 4, .max_tokens = 16};
  shape.placement = hook ? Placement::kSlotted : Placement::kPacked;
  shape.hook = hook;
  return shape;
}

// Report: rows that had not arrived were read when the sender was late.
TEST(CudaStreams, WorkQueuedBehindADispatchSeesEveryRowOfALateSender) {
  for (const bool hook : {false, true}) {
    const Scenario scenario = make_scenario(fit_to_copy(hook));
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(scenario.shape));
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      // Learns where rows will lie, and gets everything warm.
      DispatchResult result = pair.dispatch(stream);
      rank.fence();
      result.hook();
      rank.fence();
      stream.synchronise();
      const Snapshot snapshot(result.x);
      for (int round = 0; round < 6; ++round) {
        rank.fence();
        if (rank.index() == round % 2) std::this_thread::sleep_for(kLate);
        result = pair.dispatch(stream);
        result.hook();
        snapshot.take(result.x, stream);
        rank.fence();
        stream.synchronise();
        buffer.check();
        const std::string report =
            compare_received(scenario, rank.index(), snapshot.of(result), rank.stream());
        rank.expect(report.empty(), report);
      }
      rank.fence();
    });
  }
}

// An event behind the operation is all that another stream needs.
TEST(CudaStreams, AnEventHandsTheResultToAnotherStream) {
  const Scenario scenario = make_scenario(fit_to_copy(false));
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    const Stream stream;
    const Stream other;
    const Event done;
    Pair pair(rank, scenario, buffer);
    DispatchResult result = pair.dispatch(stream);
    rank.fence();
    stream.synchronise();
    const Snapshot snapshot(result.x);
    for (int round = 0; round < 6; ++round) {
      rank.fence();
      if (rank.index() == round % 2) std::this_thread::sleep_for(kLate);
      result = pair.dispatch(stream);
      done.record(stream);
      done.hold_up(other);
      snapshot.take(result.x, other);
      rank.fence();
      other.synchronise();
      const std::string report =
          compare_received(scenario, rank.index(), snapshot.of(result), rank.stream());
      rank.expect(report.empty(), report);
    }
    rank.fence();
  });
}

// Operations of one buffer are one sequence: a caller that changes stream need not order them.
TEST(CudaStreams, OperationsMayChangeStreamFromCallToCall) {
  const Scenario scenario = make_scenario(fit_to_copy(false));
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    const Stream streams[2];
    Pair pair(rank, scenario, buffer);
    for (int round = 0; round < 40; ++round) {
      pair.spoil();
      rank.fence();
      const DispatchResult result = pair.dispatch(streams[round % 2]);
      pair.combine(streams[(round + rank.index()) % 2], result, false);
      rank.fence();
      for (const Stream& stream : streams) stream.synchronise();
      buffer.check();
      const std::string report = pair.compare(result);
      rank.expect(report.empty(), "round " + std::to_string(round) + ": " + report);
      rank.fence();
    }
  });
}

}  // namespace
}  // namespace tandem::test
