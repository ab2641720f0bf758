// Typed, strided views of memory that somebody else owns. They carry no allocation and no
// framework.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "tandem/numeric.h"
#include "tandem/types.h"

namespace tandem {

inline constexpr int kMaxDims = 3;

// Maps a C++ element type to its DType.
template <typename T>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<bfloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<float8_e4m3> = DType::kFloat8E4M3;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;

// `Byte` is `void` or `const void`. Shapes are in elements, strides too. A default-constructed view
// is "no tensor": `data` is null and `num_dims` 0. An empty tensor (a dimension of 0) may have null
// data.
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  int num_dims = 0;
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};

  BasicTensorView() = default;

  // Row-major and without gaps.
  BasicTensorView(Void* data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in)
      : data(data_in), dtype(dtype_in) {
    for (const std::int64_t extent : shape_in) shape[num_dims++] = extent;
    close_gaps();
  }

  // Of `data_in`, with the type and shape of `like`, row-major and without gaps: the other side of
  // a copy.
  template <typename Other>
  BasicTensorView(Void* data_in, const BasicTensorView<Other>& like)
      : data(data_in), dtype(like.dtype), num_dims(like.num_dims), shape(like.shape) {
    close_gaps();
  }

  // A mutable view is usable wherever a constant one is asked for.
  template <typename Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: implicit by intent
      : data(other.data),
        dtype(other.dtype),
        num_dims(other.num_dims),
        shape(other.shape),
        strides(other.strides) {}

  // Makes the strides those of a row-major tensor.
  void close_gaps() {
    std::int64_t stride = 1;
    for (int dim = num_dims - 1; dim >= 0; --dim) {
      strides[dim] = stride;
      stride *= shape[dim];
    }
  }

  [[nodiscard]] bool has_value() const { return num_dims > 0; }

  [[nodiscard]] std::int64_t num_elements() const {
    std::int64_t product = num_dims > 0 ? 1 : 0;
    for (int dim = 0; dim < num_dims; ++dim) product *= shape[dim];
    return product;
  }

  // Typed pointer to the first element; the caller vouches for the type.
  template <typename T>
  [[nodiscard]] auto as() const {
    if constexpr (std::is_const_v<Void>) {
      return static_cast<const T*>(data);
    } else {
      return static_cast<T*>(data);
    }
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// A row-major view of typed memory: `view_of(values.data(), {num_tokens, hidden})`.
template <typename T>
auto view_of(T* data, std::initializer_list<std::int64_t> shape) {
  using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
  return BasicTensorView<Void>(data, kDTypeOf<std::remove_const_t<T>>, shape);
}

}  // namespace tandem
