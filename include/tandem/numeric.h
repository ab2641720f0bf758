// Storage types for bf16, fp16 and fp8 e4m3, with the conversions that define Tandem's arithmetic.
// Plain integer code, usable in constant expressions and on the device: the reference for the SIMD
// and PTX versions, which must agree bit for bit (any NaN equals any NaN).
//
// Rounding is to nearest, ties to even. Formats follow IEEE 754 (fp16), the upper half of a float32
// (bf16) and OCP 8-bit floating point, revision 1.0, E4M3 (fp8: no infinities, 0x7f is NaN).
#pragma once

#include <bit>
#include <cstdint>

#include "tandem/types.h"

namespace tandem {

struct bfloat16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bfloat16, bfloat16) = default;  // compares bits, not values
};

struct float16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(float16, float16) = default;
};

struct float8_e4m3 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(float8_e4m3, float8_e4m3) = default;
};

TANDEM_HOST_DEVICE constexpr float to_float(float value) { return value; }

TANDEM_HOST_DEVICE constexpr float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

TANDEM_HOST_DEVICE constexpr float to_float(float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = value.bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

TANDEM_HOST_DEVICE constexpr float to_float(float8_e4m3 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80U) << 24;
  const std::uint32_t exponent = (value.bits >> 3) & 0xfU;
  const std::uint32_t mantissa = value.bits & 0x7U;
  if ((value.bits & 0x7fU) == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000U);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

namespace numeric_detail {

// Rounds a finite float's magnitude bits to a format with `kMantissa` explicit mantissa bits and an
// exponent bias of `kBias`; the result is that format's magnitude, which may overflow its exponent.
template <int kMantissa, int kBias>
TANDEM_HOST_DEVICE constexpr std::uint32_t round_magnitude(std::uint32_t magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
  if (exponent >= 1) {  // normal: add half, ties to even, then rebias
    const std::uint32_t rounded =
        magnitude + ((1U << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1U);
    return (rounded >> kDropped) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
  }
  const int shift = kDropped + 1 - exponent;
  if (shift > 24) return 0;  // below half of the smallest subnormal
  const std::uint32_t significand =
      (magnitude & 0x7fffffU) | (magnitude >> 23 != 0 ? 0x800000U : 0U);
  const std::uint32_t kept = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  return kept + ((rest > half || (rest == half && (kept & 1U) != 0)) ? 1U : 0U);
}

}  // namespace numeric_detail

// Overflow gives infinity.
TANDEM_HOST_DEVICE constexpr bfloat16 to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};  // NaN stays NaN
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

// Overflow gives infinity.
TANDEM_HOST_DEVICE constexpr float16 to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return {static_cast<std::uint16_t>(sign | 0x7e00U)};
  if (magnitude == 0x7f800000U) return {static_cast<std::uint16_t>(sign | 0x7c00U)};
  const std::uint32_t rounded = numeric_detail::round_magnitude<10, 15>(magnitude);
  return {static_cast<std::uint16_t>(sign | (rounded < 0x7c00U ? rounded : 0x7c00U))};
}

// Saturates: anything beyond 448, infinities too, becomes +-448. NaN becomes 0x7f.
TANDEM_HOST_DEVICE constexpr float8_e4m3 to_float8_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return {0x7f};
  if (magnitude == 0x7f800000U) return {static_cast<std::uint8_t>(sign | 0x7eU)};
  const std::uint32_t rounded = numeric_detail::round_magnitude<3, 7>(magnitude);
  return {static_cast<std::uint8_t>(sign | (rounded < 0x7eU ? rounded : 0x7eU))};
}

// The scale of a group of channels whose largest magnitude is `amax` (not negative, may be NaN or
// infinite): max(amax, 1e-4) / 448, for the power-of-two formats rounded up to a power of two.
// `quantise` is the factor that x is multiplied by before to_float8_e4m3; `dequantise` is what the
// receiver multiplies by and what travels. A group with a NaN or an infinity has a NaN or infinite
// scale, so that every value of it dequantises to NaN (0 * infinity, or a NaN factor), and no other
// group is touched. In any other group |x| * quantise stays below 464, from where e4m3 saturates.
struct Fp8Scale {
  float quantise;
  float dequantise;
};

TANDEM_HOST_DEVICE constexpr Fp8Scale fp8_scale(float amax, Format format) {
  // Magnitudes order like their bits, NaN above all: so a NaN survives both maxima.
  const std::uint32_t floor_bits = std::bit_cast<std::uint32_t>(kFp8AmaxFloor);
  const std::uint32_t amax_bits = std::bit_cast<std::uint32_t>(amax) & 0x7fffffffU;
  const float floored = std::bit_cast<float>(amax_bits > floor_bits ? amax_bits : floor_bits);
  const float scale = floored / kFp8Max;
  if (format == Format::kFp8) return {kFp8Max / floored, scale};
  const std::uint32_t scale_bits = std::bit_cast<std::uint32_t>(scale);
  if (scale_bits >= 0x7f800000U) return {1.0F / scale, scale};  // 0 or NaN, as in kFp8
  const float power = std::bit_cast<float>((scale_bits + 0x7fffffU) & 0x7f800000U);
  return {1.0F / power, power};
}

// A power-of-two scale as a UE8M0 byte (OCP MX E8M0): its biased exponent, 0 for 2^-127; 255 stands
// for NaN and infinity.
TANDEM_HOST_DEVICE constexpr std::uint8_t to_ue8m0(float scale) {
  return static_cast<std::uint8_t>((std::bit_cast<std::uint32_t>(scale) & 0x7fffffffU) >> 23);
}

TANDEM_HOST_DEVICE constexpr float from_ue8m0(std::uint8_t byte) {
  if (byte == 255) return std::bit_cast<float>(0x7fc00000U);
  if (byte == 0) return 0x1p-127F;
  return std::bit_cast<float>(static_cast<std::uint32_t>(byte) << 23);
}

}  // namespace tandem
