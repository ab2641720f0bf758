// The bytes of one row: values, then (fp8) scales, each part padded to 16 bytes, so that a row
// travels as one contiguous piece and every part may be moved by 16-byte accesses and bulk copies.
//
//   | values: H * size | pad | scales: ceil(H/128) floats, or as many bytes (UE8M0) | pad |
#pragma once

#include <cstdint>

#include "tandem/types.h"

namespace tandem::layout {

inline constexpr int kRowAlignment =
    16;  // width of the widest ordinary access; unit of a bulk copy

TANDEM_HOST_DEVICE constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

TANDEM_HOST_DEVICE constexpr int num_fp8_groups(int hidden) {
  return (hidden + kFp8GroupSize - 1) / kFp8GroupSize;
}

struct RowShape {
  std::int32_t hidden = 0;
  Format format = Format::kBFloat16;

  TANDEM_HOST_DEVICE constexpr std::int64_t value_bytes() const {
    return std::int64_t{hidden} * size_of(value_dtype(format));
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t scales_offset() const {
    return round_up(value_bytes(), kRowAlignment);
  }
  // Elements of the scales tensor in one row: floats, or for UE8M0 int32 words of four bytes.
  TANDEM_HOST_DEVICE constexpr int num_scales() const {
    if (!is_fp8(format)) return 0;
    const int groups = num_fp8_groups(hidden);
    return format == Format::kFp8Ue8m0 ? (groups + 3) / 4 : groups;
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t pitch() const {
    return scales_offset() + round_up(4 * std::int64_t{num_scales()}, kRowAlignment);
  }
};

// Pitch of a combined row: no scales.
TANDEM_HOST_DEVICE constexpr std::int64_t combine_pitch(int hidden, DType dtype) {
  return round_up(std::int64_t{hidden} * size_of(dtype), kRowAlignment);
}

// The widest pitch that any format allowed by `widest` can need for up to `max_hidden` channels.
constexpr std::int64_t max_dispatch_pitch(int max_hidden, Format widest) {
  std::int64_t pitch = 0;
  for (const Format format : {Format::kBFloat16, Format::kFloat16, Format::kFloat32, Format::kFp8,
                              Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    if (size_of(value_dtype(format)) > size_of(value_dtype(widest)) && !is_fp8(format)) continue;
    const std::int64_t candidate = RowShape{max_hidden, format}.pitch();
    if (candidate > pitch) pitch = candidate;
  }
  return pitch;
}

}  // namespace tandem::layout
