#include "backend/cuda/graph_recorder.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

constexpr int kNumCopies = 21;
constexpr int kWarmingCopies = 3;

class GraphRecorder final : public runtime::Recorder {
 public:
  explicit GraphRecorder(int device) : device_(resolve_device(device)) {
    const DeviceScope scope(device_);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
    for (cudaEvent_t* event : {&begin_, &end_}) {
      check_cuda(cudaEventCreate(event), "cudaEventCreate");
    }
  }

  ~GraphRecorder() override {
    for (const Recording& recording : recordings_) {
      warn_cuda(cudaGraphExecDestroy(recording.graph), "cudaGraphExecDestroy");
      warn_cuda(cudaEventDestroy(recording.after_first), "cudaEventDestroy");
    }
    for (cudaEvent_t event : {begin_, end_}) {
      if (event != nullptr) warn_cuda(cudaEventDestroy(event), "cudaEventDestroy");
    }
    if (stream_ != nullptr) warn_cuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  GraphRecorder(const GraphRecorder&) = delete;
  GraphRecorder& operator=(const GraphRecorder&) = delete;

  [[nodiscard]] void* stream() const override { return stream_; }

  int record(int count, std::function<void()> operation) override {
    const DeviceScope scope(device_);
    Recording recording;
    check_cuda(cudaEventCreate(&recording.after_first), "cudaEventCreate");
    cudaGraph_t graph = nullptr;
    try {
      check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
                 "cudaStreamBeginCapture");
      operation();
      // A node of the graph: it says when the first operation has ended.
      check_cuda(cudaEventRecordWithFlags(recording.after_first, stream_, cudaEventRecordExternal),
                 "cudaEventRecordWithFlags");
      for (int call = 1; call < count; ++call) operation();
      check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
      check_cuda(cudaGraphInstantiate(&recording.graph, graph, 0), "cudaGraphInstantiate");
      check_cuda(cudaGraphUpload(recording.graph, stream_), "cudaGraphUpload");
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    } catch (...) {
      abandon(recording, graph);
      throw;
    }
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    recordings_.push_back(recording);
    return static_cast<int>(recordings_.size()) - 1;
  }

  void copy_rows(const TensorView& to, const ConstTensorView& from) override {
    const auto element_bytes = static_cast<std::size_t>(size_of(from.dtype));
    const auto bytes_of = [&](std::int64_t elements) {
      return static_cast<std::size_t>(elements) * element_bytes;
    };
    check_cuda(
        cudaMemcpy2DAsync(to.data, bytes_of(to.strides[0]), from.data, bytes_of(from.strides[0]),
                          bytes_of(from.shape[1]), static_cast<std::size_t>(from.shape[0]),
                          cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpy2DAsync");
  }

  void start(int recording) override {
    last_ = static_cast<std::size_t>(recording);
    check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    check_cuda(cudaGraphLaunch(recordings_.at(last_).graph, stream_), "cudaGraphLaunch");
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
  }

  runtime::RunTime finish() override {
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return {.all_us = elapsed_us(begin_, end_),
            .after_first_us = elapsed_us(recordings_.at(last_).after_first, end_)};
  }

  [[nodiscard]] runtime::DeviceSummary device() const override {
    const DeviceScope scope(device_);
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return {.name = properties.name,
            .num_devices = count_devices(),
            .num_sms = properties.multiProcessorCount,
            .free_bytes = static_cast<std::int64_t>(free_bytes)};
  }

  [[nodiscard]] double copy_gbs(std::int64_t size_bytes) override {
    const DeviceScope scope(device_);
    const auto source = allocate_device(device_, size_bytes);
    const auto destination = allocate_device(device_, size_bytes);
    // Not zeros, which a device may move faster than data; any pattern of bits will do.
    check_cuda(cudaMemsetAsync(source.get(), 0x5a, static_cast<std::size_t>(size_bytes), stream_),
               "cudaMemsetAsync");
    std::vector<double> times;
    for (int copy = -kWarmingCopies; copy < kNumCopies; ++copy) {
      check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      check_cuda(
          cudaMemcpyAsync(destination.get(), source.get(), static_cast<std::size_t>(size_bytes),
                          cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
      check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      if (copy >= 0) times.push_back(elapsed_us(begin_, end_));
    }
    std::sort(times.begin(), times.end());
    return 2.0 * static_cast<double>(size_bytes) / (times[times.size() / 2] * 1e3);
  }

 private:
  struct Recording {
    cudaGraphExec_t graph = nullptr;
    cudaEvent_t after_first = nullptr;
  };

  static double elapsed_us(cudaEvent_t from, cudaEvent_t to) {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3;
  }

  // Ends what is left of a capture that failed.
  void abandon(const Recording& recording, cudaGraph_t graph) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream_, &status);
    if (status != cudaStreamCaptureStatusNone) (void)cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (recording.graph != nullptr) (void)cudaGraphExecDestroy(recording.graph);
    (void)cudaEventDestroy(recording.after_first);
    (void)cudaGetLastError();
  }

  int device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::vector<Recording> recordings_;
  std::size_t last_ = 0;
};

}  // namespace

std::unique_ptr<runtime::Recorder> make_graph_recorder(int device) {
  return std::make_unique<GraphRecorder>(device);
}

}  // namespace tandem::cuda
