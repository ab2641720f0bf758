#include "backend/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <string>

#include "backend/cuda/cuda_buffer.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/graph_recorder.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/kernel_params.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

class CudaBackend final : public runtime::BackendInterface {
 public:
  [[nodiscard]] Backend backend() const override { return Backend::kCuda; }

  [[nodiscard]] BackendInfo info() const override {
    BackendInfo info{
        .backend = Backend::kCuda, .built = true, .usable = false, .why_not = {}, .details = {}};
    try {
      const int num_devices = count_devices();
      for (int device = 0; device < num_devices; ++device) {
        cudaDeviceProp properties{};
        check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
        info.details.push_back(std::to_string(device) + ": " + properties.name + ", sm_" +
                               std::to_string(properties.major) + std::to_string(properties.minor) +
                               ", " + std::to_string(properties.multiProcessorCount) +
                               " multiprocessors, " +
                               std::to_string(properties.totalGlobalMem >> 20) + " MiB");
        if (properties.major >= 8) info.usable = true;
      }
      if (!info.usable) info.why_not = "no CUDA device of compute capability 8.0 or later";
    } catch (const Error& error) {
      info.why_not = error.what();
    }
    return info;
  }

  [[nodiscard]] int num_arrival_words() const override { return kNumArrivalWords; }

  [[nodiscard]] std::unique_ptr<runtime::BackendBuffer> make_buffer(
      const std::shared_ptr<runtime::Bootstrap>& bootstrap,
      const runtime::BufferPlan& plan) const override {
    return std::make_unique<CudaBuffer>(bootstrap, plan);
  }

  [[nodiscard]] std::unique_ptr<runtime::BackendBuffer> join_buffer(
      const runtime::BufferPlan& plan, runtime::Offer offer) const override {
    if (offer.network != nullptr) {
      throw Error(ErrorCode::kUnsupported,
                  "ranks on GPUs of several hosts cannot be replaced or added yet");
    }
    return std::make_unique<CudaBuffer>(plan, std::move(offer.board));
  }

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t size_bytes, int device) const override {
    prepare_host_copies(resolve_device(device));
    return size_bytes == 0 ? nullptr : allocate_device(resolve_device(device), size_bytes);
  }

  void copy_2d(void* destination, std::int64_t destination_pitch, const void* source,
               std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
               void* stream) const override {
    copy_rows(destination, destination_pitch, source, source_pitch, row_bytes, num_rows, stream);
  }

  void use_device(int number) const override {
    check_cuda(cudaSetDevice(number % count_devices()), "cudaSetDevice");
  }

  [[nodiscard]] std::unique_ptr<runtime::Recorder> make_recorder(int device) const override {
    return make_graph_recorder(device);
  }
};

}  // namespace

const runtime::BackendInterface& backend() {
  static const CudaBackend instance;
  return instance;
}

}  // namespace tandem::cuda
