// What the GPU tests share: checked CUDA calls, streams and graphs of a rank.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/exchange.h"

namespace tandem::test {

inline void require_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

class Stream {
 public:
  Stream() {
    require_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void synchronise() const {
    require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `body` queues on the stream, captured. The capturing rank keeps its peers waiting for
// nothing: make graphs between barriers.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& body) {
    cudaGraph_t graph = nullptr;
    require_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture");
    body();
    require_cuda(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
    require_cuda(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    require_cuda(cudaGraphUpload(executable_, stream.get()), "cudaGraphUpload");
    require_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    stream.synchronise();
  }
  ~Graph() { (void)cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const {
    require_cuda(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// An exchange whose pair of operations can be called on any stream and captured: nothing in it
// waits or allocates. With zero-copy the outputs are copied to the view by the stream.
class Pair {
 public:
  Pair(Rank& rank, const Scenario& scenario, Buffer& buffer)
      : rank_(rank), scenario_(scenario), buffer_(buffer), exchange_(rank, staged(), buffer) {}

  DispatchResult dispatch(const Stream& stream) {
    DispatchOptions options = exchange_.dispatch_options();
    options.stream = stream.get();
    return buffer_.dispatch(exchange_.x(), exchange_.topk_idx(), options);
  }

  Hook combine(const Stream& stream, const DispatchResult& result, bool zero_copy) {
    ConstTensorView y = exchange_.staged_y();
    if (zero_copy) {
      const TensorView view =
          buffer_.next_combine_buffer(result.handle, scenario_.shape.combine_dtype);
      const int dim = view.num_dims - 2;
      const std::size_t size = static_cast<std::size_t>(size_of(view.dtype));
      const auto width = static_cast<std::size_t>(view.shape[dim + 1]) * size;
      const std::int64_t rows = dim == 0 ? view.shape[0] : view.shape[0] * view.shape[1];
      if (rows > 0) {
        require_cuda(
            cudaMemcpy2DAsync(view.data, static_cast<std::size_t>(view.strides[dim]) * size, y.data,
                              width, width, static_cast<std::size_t>(rows),
                              cudaMemcpyDeviceToDevice, stream.get()),
            "cudaMemcpy2DAsync");
      }
      y = view;
    }
    CombineOptions options = exchange_.combine_options();
    options.stream = stream.get();
    return buffer_.combine(y, exchange_.topk_weights(), result.handle, exchange_.out(), options);
  }

  // Both, each with its hook where the scenario has one.
  DispatchResult run(const Stream& stream, bool zero_copy) {
    DispatchResult result = dispatch(stream);
    result.hook();
    combine(stream, result, zero_copy)();
    return result;
  }

  // Overwrites the result of the last combine. On a host's copy stream: between fences.
  void spoil() {
    const TensorView out = exchange_.out();
    if (out.num_elements() == 0) return;
    const std::vector<std::byte> pattern(
        static_cast<std::size_t>(out.num_elements() * size_of(out.dtype)), std::byte{0xee});
    upload(out, pattern.data(), rank_.stream());
  }

  // "" if all is as the oracle says, of this pair's problem or of another on the same tensors.
  // After the stream's work has ended.
  [[nodiscard]] std::string compare(const DispatchResult& result) {
    return compare(result, scenario_);
  }
  [[nodiscard]] std::string compare(const DispatchResult& result, const Scenario& scenario) {
    const std::string received = compare_received(scenario, rank_.index(), result, rank_.stream());
    if (!received.empty()) return "dispatch: " + received;
    const std::string combined =
        compare_combined(scenario, rank_.index(), exchange_.out(), rank_.stream());
    return combined.empty() ? "" : "combine: " + combined;
  }

  Exchange& exchange() { return exchange_; }

 private:
  // The tensor of outputs exists in staged exchanges only.
  const Scenario& staged() {
    staged_ = scenario_;
    staged_.shape.zero_copy = false;
    return staged_;
  }

  Rank& rank_;
  const Scenario& scenario_;
  Buffer& buffer_;
  Scenario staged_;
  Exchange exchange_;
};

// A captured pair of operations, with its result.
class Replay {
 public:
  Replay(Pair& pair, const Stream& stream, bool hooks) : stream_(stream) {
    graph_ = std::make_unique<Graph>(stream, [&] {
      if (hooks) {
        result_ = pair.run(stream, false);
      } else {
        result_ = pair.dispatch(stream);
        pair.combine(stream, result_, false);
      }
    });
  }
  void launch() { graph_->launch(stream_); }
  void run() {
    launch();
    stream_.synchronise();
  }
  [[nodiscard]] const DispatchResult& result() const { return result_; }

 private:
  const Stream& stream_;
  DispatchResult result_;
  std::unique_ptr<Graph> graph_;
};

inline void expect_as(const Scenario& scenario, Rank& rank, Pair& pair, const Replay& replay,
                      const char* when) {
  const std::string report = pair.compare(replay.result(), scenario);
  rank.expect(report.empty(), std::string(when) + ": " + report);
}

// Three ranks of which each needs every other, and the one that they may lose.
inline constexpr int kVictim = 1;

inline Shape entangled_three() {
  return {.num_ranks = 3,
          .num_experts = 7,
          .hidden = 1000,
          .topk = 5,
          .max_tokens = 20,
          .tokens = {20, 7, 13},
          .routing = Routing::kFull};
}

// The victim, which has been masked, asks to be let in, and is.
inline void let_victim_in(Rank& rank, Buffer& buffer) {
  if (rank.index() == kVictim) {
    rank.expect(buffer.recover()[kVictim], "it is back");
  } else if (rank.index() == 0) {
    while (buffer.waiting().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    buffer.unmask(kVictim);
  }
}

// Packed, and slotted with hooks.
inline std::vector<Shape> entangled_shapes() {
  std::vector<Shape> shapes{entangled_three(), entangled_three()};
  shapes[1].placement = Placement::kSlotted;
  shapes[1].hook = true;
  shapes[1].format = Format::kFp8;
  return shapes;
}

// A problem as replays run it with all ranks and without one. Graphs give combine the outputs that
// they were captured with, wherever rows lie: all ones.
inline std::pair<Scenario, Scenario> with_and_without(const Shape& shape, int victim) {
  Scenario all = make_scenario(shape);
  for (std::vector<std::byte>& y : all.y) {
    const std::size_t num_elements = y.size() / size_of(shape.combine_dtype);
    y = encode(std::vector<float>(num_elements, 1.0F), shape.combine_dtype);
  }
  all.out = reference::combine(all.problem, all.y, shape.combine_dtype);
  Scenario rest = without(all, {victim});
  reference::Problem weighted = all.problem;  // nothing, where the victim would give it
  const auto& lost = all.received[victim].experts;
  for (reference::RankInput& input : weighted.ranks) {
    for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
      if (std::find(lost.begin(), lost.end(), input.topk_idx[i]) != lost.end()) {
        input.topk_weights[i] = 0;
      }
    }
  }
  rest.out = reference::combine(weighted, all.y, shape.combine_dtype);
  return {std::move(all), std::move(rest)};
}

}  // namespace tandem::test
