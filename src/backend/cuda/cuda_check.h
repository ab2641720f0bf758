// CUDA calls of the host, checked.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace tandem::cuda {

// Throws an Error that names the call, the code and CUDA's own text: kUnsupported where there is no
// usable device or driver, kResource otherwise.
void check_cuda(cudaError_t status, const char* call,
                std::source_location where = std::source_location::current());

// For destructors: the text of an error goes to standard error.
void warn_cuda(cudaError_t status, const char* call) noexcept;

// Makes a device current for this thread while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

// At least one; throws kUnsupported, saying why, if there is none.
int count_devices();

// The device of `device`, or the current one if that is negative. Throws as count_devices, and
// kInvalidArgument if there are not so many.
int resolve_device(int device);

}  // namespace tandem::cuda
