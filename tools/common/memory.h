// Memory of a backend as the tools use it: arrays, copies of rows to and from the host, and the one
// place that names a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "tandem/array.h"
#include "tandem/tensor.h"

namespace tandem::tools {

// Rows [first, first + count) of a tensor whose leading dimensions are taken as one, [count, H]; of
// a one-dimensional tensor its elements.
template <typename Void>
BasicTensorView<Void> rows_of(const BasicTensorView<Void>& tensor, std::int64_t first,
                              std::int64_t count) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  BasicTensorView<Void> rows;
  rows.dtype = tensor.dtype;
  const int row_dim = tensor.num_dims > 1 ? tensor.num_dims - 2 : 0;
  rows.num_dims = tensor.num_dims - row_dim;
  rows.shape[0] = count;
  rows.strides[0] = tensor.strides[row_dim];
  if (rows.num_dims == 2) {
    rows.shape[1] = tensor.shape[row_dim + 1];
    rows.strides[1] = tensor.strides[row_dim + 1];
  }
  if (tensor.data != nullptr) {
    rows.data = static_cast<Byte*>(tensor.data) + first * rows.strides[0] * size_of(tensor.dtype);
  }
  return rows;
}

class Memory {
 public:
  // `stream`: null for the backend's default one.
  explicit Memory(Backend backend, void* stream = nullptr);

  [[nodiscard]] Backend backend() const { return backend_; }

  // The stream that operations and copies are given.
  [[nodiscard]] void* stream() const { return stream_; }

  [[nodiscard]] Array array(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return {backend_, dtype, shape};
  }

  // `host` holds the tensor's elements, row-major and without gaps.
  void upload(const TensorView& tensor, const void* host) const;
  void download(void* host, const ConstTensorView& tensor) const;

  // An array that holds a copy of `host`.
  [[nodiscard]] Array array_of(const void* host, DType dtype,
                               std::initializer_list<std::int64_t> shape) const {
    Array result = array(dtype, shape);
    upload(result, host);
    return result;
  }

  template <typename T>
  [[nodiscard]] std::vector<T> download(const ConstTensorView& tensor) const {
    std::vector<T> host(static_cast<std::size_t>(tensor.num_elements()));
    download(host.data(), tensor);
    return host;
  }

  // Returns once the work queued on the stream has ended.
  void synchronise() const;

 private:
  Backend backend_;
  void* stream_;
  Array scratch_;  // for synchronise(); made beforehand, since making it may synchronise the device
};

}  // namespace tandem::tools
