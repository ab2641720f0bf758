#include "common/memory.h"

namespace tandem::tools {

Memory::Memory(Backend backend, void* stream) : backend_(backend), stream_(stream) {
  if (backend_ != Backend::kCpu) scratch_ = array(DType::kInt32, {1});
}

void Memory::upload(const TensorView& tensor, const void* host) const {
  if (tensor.num_elements() == 0) return;
  copy(tensor, ConstTensorView(host, tensor), backend_, stream());
}

void Memory::download(void* host, const ConstTensorView& tensor) const {
  if (tensor.num_elements() == 0) return;
  copy(TensorView(host, tensor), tensor, backend_, stream());
}

void Memory::synchronise() const {
  if (backend_ == Backend::kCpu) return;  // its operations end before they return
  // A copy waits for what is queued before it; the public interface has no other wait.
  std::int32_t word = 0;
  upload(scratch_, &word);
}

}  // namespace tandem::tools
