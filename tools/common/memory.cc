#include "common/memory.h"

namespace tandem::tools {

namespace {

// A view of host memory in the shape of `tensor`, without gaps.
template <typename Void, typename Other>
BasicTensorView<Void> host_view(Void* host, const BasicTensorView<Other>& tensor) {
  BasicTensorView<Void> view;
  view.data = host;
  view.dtype = tensor.dtype;
  view.num_dims = tensor.num_dims;
  view.shape = tensor.shape;
  std::int64_t stride = 1;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    view.strides[dim] = stride;
    stride *= view.shape[dim];
  }
  return view;
}

}  // namespace

Memory::Memory(Backend backend) : backend_(backend) {
  if (backend_ != Backend::kCpu) scratch_ = array(DType::kInt32, {1});
}

void Memory::upload(const TensorView& tensor, const void* host) const {
  if (tensor.num_elements() == 0) return;
  copy(tensor, host_view(host, tensor), backend_, stream());
}

void Memory::download(void* host, const ConstTensorView& tensor) const {
  if (tensor.num_elements() == 0) return;
  copy(host_view(host, tensor), tensor, backend_, stream());
}

void Memory::synchronise() const {
  if (backend_ == Backend::kCpu) return;  // its operations end before they return
  // A copy waits for what is queued before it; the public interface has no other wait.
  std::int32_t word = 0;
  upload(scratch_, &word);
}

}  // namespace tandem::tools
