#include "test_low_latency/experts.h"

#include <array>
#include <cstring>

#include "tandem/numeric.h"

namespace tandem::tools {

namespace {

template <typename T>
void widen(std::span<const std::byte> values, std::span<float> x) {
  const T* from = reinterpret_cast<const T*>(values.data());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = to_float(from[i]);
}

const std::array<float, 256>& fp8_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int bits = 0; bits < 256; ++bits) {
      values[static_cast<std::size_t>(bits)] =
          to_float(float8_e4m3{static_cast<std::uint8_t>(bits)});
    }
    return values;
  }();
  return table;
}

float scale_of(Format format, const std::byte* row_scales, int group) {
  if (format == Format::kFp8Ue8m0) return from_ue8m0(static_cast<std::uint8_t>(row_scales[group]));
  float scale;
  std::memcpy(&scale, row_scales + 4 * group, sizeof(scale));
  return scale;
}

}  // namespace

// As buffer.h documents DispatchResult::scales.
int num_scales(Format format, int hidden) {
  if (!is_fp8(format)) return 0;
  const int channels = format == Format::kFp8Ue8m0 ? 4 * kFp8GroupSize : kFp8GroupSize;
  return (hidden + channels - 1) / channels;
}

void dequantise(Format format, int hidden, std::span<const std::byte> values,
                std::span<const std::byte> scales, std::span<float> x) {
  switch (format) {
    case Format::kBFloat16:
      return widen<bfloat16>(values, x);
    case Format::kFloat16:
      return widen<float16>(values, x);
    case Format::kFloat32:
      return widen<float>(values, x);
    default:
      break;
  }
  const std::array<float, 256>& table = fp8_table();
  const auto width = static_cast<std::size_t>(hidden);
  const auto row_scale_bytes = static_cast<std::size_t>(num_scales(format, hidden)) * 4;
  for (std::size_t row = 0; row * width < x.size(); ++row) {
    const std::byte* row_scales = scales.data() + row * row_scale_bytes;
    for (int first = 0; first < hidden; first += kFp8GroupSize) {
      const float scale = scale_of(format, row_scales, first / kFp8GroupSize);
      const int end = first + kFp8GroupSize < hidden ? first + kFp8GroupSize : hidden;
      for (int channel = first; channel < end; ++channel) {
        const std::size_t i = row * width + static_cast<std::size_t>(channel);
        x[i] = table[static_cast<std::size_t>(values[i])] * scale;
      }
    }
  }
}

void apply_expert(int expert, std::span<const float> x, DType dtype, std::span<std::byte> y) {
  const float factor = expert_factor(expert);
  switch (dtype) {
    case DType::kFloat16: {
      auto* to = reinterpret_cast<float16*>(y.data());
      for (std::size_t i = 0; i < x.size(); ++i) to[i] = to_float16(x[i] * factor);
      return;
    }
    case DType::kFloat32: {
      auto* to = reinterpret_cast<float*>(y.data());
      for (std::size_t i = 0; i < x.size(); ++i) to[i] = x[i] * factor;
      return;
    }
    default: {
      auto* to = reinterpret_cast<bfloat16*>(y.data());
      for (std::size_t i = 0; i < x.size(); ++i) to[i] = to_bfloat16(x[i] * factor);
      return;
    }
  }
}

}  // namespace tandem::tools
