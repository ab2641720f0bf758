#include "backend/cuda/cuda_check.h"

#include <cstdio>
#include <string>

#include "tandem/error.h"

namespace tandem::cuda {

void check_cuda(cudaError_t status, const char* call, std::source_location where) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // it is reported here; the next call starts clean
  const bool absent = status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
                      status == cudaErrorInitializationError ||
                      status == cudaErrorNoKernelImageForDevice ||
                      status == cudaErrorSystemDriverMismatch || status == cudaErrorSystemNotReady;
  throw Error(absent ? ErrorCode::kUnsupported : ErrorCode::kResource,
              std::string(call) + " failed: " + cudaGetErrorName(status) + ": " +
                  cudaGetErrorString(status),
              where);
}

void warn_cuda(cudaError_t status, const char* call) noexcept {
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  std::fprintf(stderr, "tandem: %s failed: %s\n", call, cudaGetErrorString(status));
}

DeviceScope::DeviceScope(int device) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() { warn_cuda(cudaSetDevice(before_), "cudaSetDevice"); }

int count_devices() {
  int num_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_devices);
  if (status != cudaSuccess || num_devices == 0) {
    (void)cudaGetLastError();
    throw Error(ErrorCode::kUnsupported,
                std::string("no CUDA device: ") +
                    (status == cudaSuccess ? "none is visible" : cudaGetErrorString(status)));
  }
  return num_devices;
}

int resolve_device(int device) {
  const int num_devices = count_devices();
  if (device < 0) {
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  } else if (device >= num_devices) {
    throw Error(ErrorCode::kInvalidArgument, "device is " + std::to_string(device) +
                                                 ", must be below the number of CUDA devices, " +
                                                 std::to_string(num_devices));
  }
  return device;
}

}  // namespace tandem::cuda
