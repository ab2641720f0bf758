// Arrays and copies, through the backend that owns the memory.
#include "tandem/array.h"

#include <string>

#include "runtime/backend.h"
#include "tandem/error.h"

namespace tandem {

Array::Array(Backend backend, DType dtype, std::initializer_list<std::int64_t> shape, int device)
    : view_(nullptr, dtype, shape) {
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "shape has a dimension of " + std::to_string(extent) + ", must not be negative");
    }
  }
  const std::int64_t bytes = view_.num_elements() * size_of(dtype);
  memory_ = runtime::backend(backend).allocate(bytes, device);
  view_.data = memory_.get();
}

void copy(TensorView destination, ConstTensorView source, Backend backend, void* stream) {
  if (destination.dtype != source.dtype || destination.num_dims != source.num_dims ||
      destination.shape != source.shape) {
    throw Error(ErrorCode::kInvalidArgument,
                "destination and source of a copy differ in dtype or shape");
  }
  if (source.num_elements() == 0) return;
  // Rows of adjacent elements; matrices of evenly spaced rows; one backend call a matrix.
  const int last = source.num_dims - 1;
  const std::int64_t size = size_of(source.dtype);
  const std::int64_t rows = last >= 1 ? source.shape[last - 1] : 1;
  const std::int64_t matrices = last >= 2 ? source.shape[last - 2] : 1;
  const auto pitch = [&](const auto& tensor) {
    return last >= 1 ? tensor.strides[last - 1] * size : source.shape[last] * size;
  };
  const auto matrix_bytes = [&](const auto& tensor) {
    return last >= 2 ? tensor.strides[last - 2] * size : 0;
  };
  for (std::int64_t matrix = 0; matrix < matrices; ++matrix) {
    runtime::backend(backend).copy_2d(
        static_cast<std::byte*>(destination.data) + matrix * matrix_bytes(destination),
        pitch(destination),
        static_cast<const std::byte*>(source.data) + matrix * matrix_bytes(source), pitch(source),
        source.shape[last] * size, rows, stream);
  }
}

}  // namespace tandem
