// numeric.h against formulas that share nothing with it: values from the definition of the fields
// (ldexp), roundings by a search for the nearest value, and the compiler's own half precision.
#include "tandem/numeric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace tandem {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a magnitude by the definition of binary floating point: (1.)mantissa * 2^exponent.
double value_by_definition(std::uint32_t magnitude, int mantissa_bits, int bias) {
  const std::uint32_t mantissa = magnitude & ((1U << mantissa_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> mantissa_bits);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// All finite magnitudes of a format in ascending order; a magnitude's index is its bit pattern.
class Magnitudes {
 public:
  Magnitudes(std::uint32_t num_finite, int mantissa_bits, int bias) {
    for (std::uint32_t bits = 0; bits <= num_finite; ++bits) {  // one past the largest: for ties
      values_.push_back(value_by_definition(bits, mantissa_bits, bias));
    }
  }

  // Pattern of the magnitude nearest to `value`, of two equally near the even one. num_finite means
  // overflow.
  [[nodiscard]] std::uint32_t nearest(double value) const {
    const auto above = std::lower_bound(values_.begin(), values_.end(), value);
    if (above == values_.end()) return static_cast<std::uint32_t>(values_.size() - 1);
    const auto pattern = static_cast<std::uint32_t>(above - values_.begin());
    if (*above == value) return pattern;
    const double down = value - values_[pattern - 1];
    const double up = *above - value;
    if (down == up) return pattern % 2 == 0 ? pattern : pattern - 1;
    return down < up ? pattern - 1 : pattern;
  }

  [[nodiscard]] double operator[](std::uint32_t pattern) const { return values_[pattern]; }
  [[nodiscard]] std::uint32_t num_finite() const {
    return static_cast<std::uint32_t>(values_.size() - 1);
  }

 private:
  std::vector<double> values_;
};

const Magnitudes kBfloat16s(0x7f80, 7, 127);
const Magnitudes kFloat16s(0x7c00, 10, 15);
const Magnitudes kFloat8s(0x7f, 3, 7);

// Floats that are hard to round to a format: its values, the middles between neighbours, and the
// floats next to both; beyond its largest value; and any old bits.
std::vector<float> hard_floats(const Magnitudes& format) {
  std::vector<float> floats;
  const auto add = [&floats](float value) {
    for (const float near : {std::nextafterf(value, 0), value, std::nextafterf(value, kInfinity)}) {
      floats.push_back(near);
      floats.push_back(-near);
    }
  };
  for (std::uint32_t pattern = 0; pattern < format.num_finite(); ++pattern) {
    add(static_cast<float>(format[pattern]));
    add(static_cast<float>((format[pattern] + format[pattern + 1]) / 2));
  }
  add(std::numeric_limits<float>::max());
  add(std::numeric_limits<float>::denorm_min());
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const float value = float_of(random());
    if (!std::isnan(value)) floats.push_back(value);
  }
  return floats;
}

TEST(Numeric, EveryBfloat16HasItsDefinedValue) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    EXPECT_EQ(std::signbit(value), bits >= 0x8000);
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (magnitude < 0x7f80) {
      ASSERT_EQ(std::abs(value), kBfloat16s[magnitude]) << std::hex << bits;
    } else if (magnitude == 0x7f80) {
      ASSERT_TRUE(std::isinf(value));
    } else {
      ASSERT_TRUE(std::isnan(value));
    }
  }
}

TEST(Numeric, EveryFloat16HasItsDefinedValue) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(float16{static_cast<std::uint16_t>(bits)});
    EXPECT_EQ(std::signbit(value), bits >= 0x8000);
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (magnitude < 0x7c00) {
      ASSERT_EQ(std::abs(value), kFloat16s[magnitude]) << std::hex << bits;
    } else if (magnitude == 0x7c00) {
      ASSERT_TRUE(std::isinf(value));
    } else {
      ASSERT_TRUE(std::isnan(value));
    }
  }
}

TEST(Numeric, EveryFloat8HasItsDefinedValue) {
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const float value = to_float(float8_e4m3{static_cast<std::uint8_t>(bits)});
    EXPECT_EQ(std::signbit(value), bits >= 0x80);
    const std::uint32_t magnitude = bits & 0x7fU;
    if (magnitude < 0x7f) {
      ASSERT_EQ(std::abs(value), kFloat8s[magnitude]) << std::hex << bits;
    } else {
      ASSERT_TRUE(std::isnan(value));
    }
  }
  EXPECT_EQ(to_float(float8_e4m3{0x7e}), kFp8Max);
}

// Values that a format holds come back as the same bits, signs of zero included.
TEST(Numeric, EveryPatternSurvivesTheWayThroughFloat) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    if ((bits & 0x7fffU) <= 0x7f80) {
      ASSERT_EQ(to_bfloat16(to_float(bfloat16{bits})).bits, bits);
    } else {
      ASSERT_TRUE(std::isnan(to_float(to_bfloat16(to_float(bfloat16{bits})))));
    }
    if ((bits & 0x7fffU) <= 0x7c00) {
      ASSERT_EQ(to_float16(to_float(float16{bits})).bits, bits);
    } else {
      ASSERT_TRUE(std::isnan(to_float(to_float16(to_float(float16{bits})))));
    }
  }
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const auto value = float8_e4m3{static_cast<std::uint8_t>(bits)};
    if ((bits & 0x7fU) != 0x7f) {
      ASSERT_EQ(to_float8_e4m3(to_float(value)), value);
    } else {
      ASSERT_EQ(to_float8_e4m3(to_float(value)).bits, 0x7f);
    }
  }
}

TEST(Numeric, Bfloat16RoundsToTheNearestTiesToEven) {
  for (const float value : hard_floats(kBfloat16s)) {
    const std::uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const std::uint32_t expected = kBfloat16s.nearest(std::abs(static_cast<double>(value)));
    ASSERT_EQ(to_bfloat16(value).bits, sign | expected) << std::hexfloat << value;
  }
}

TEST(Numeric, Float16RoundsToTheNearestTiesToEven) {
  for (const float value : hard_floats(kFloat16s)) {
    const std::uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const std::uint32_t expected = kFloat16s.nearest(std::abs(static_cast<double>(value)));
    ASSERT_EQ(to_float16(value).bits, sign | expected) << std::hexfloat << value;
  }
}

std::uint8_t nearest_float8(float value) {
  const std::uint32_t sign = std::signbit(value) ? 0x80 : 0;
  const std::uint32_t nearest = kFloat8s.nearest(std::abs(static_cast<double>(value)));
  return static_cast<std::uint8_t>(sign | std::min(nearest, 0x7eU));  // saturates
}

TEST(Numeric, Float8RoundsToTheNearestTiesToEvenAndSaturates) {
  for (const float value : hard_floats(kFloat8s)) {
    ASSERT_EQ(to_float8_e4m3(value).bits, nearest_float8(value)) << std::hexfloat << value;
  }
}

TEST(Numeric, Float8OfEveryBfloat16AndFloat16) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    for (const float value : {to_float(bfloat16{bits}), to_float(float16{bits})}) {
      const std::uint8_t expected = std::isnan(value) ? 0x7f : nearest_float8(value);
      ASSERT_EQ(to_float8_e4m3(value).bits, expected) << std::hexfloat << value;
    }
  }
}

TEST(Numeric, InfinityAndNanStayOrSaturate) {
  EXPECT_EQ(to_bfloat16(kInfinity).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(-kInfinity).bits, 0xff80);
  EXPECT_EQ(to_float16(kInfinity).bits, 0x7c00);
  EXPECT_EQ(to_float16(-kInfinity).bits, 0xfc00);
  EXPECT_EQ(to_float8_e4m3(kInfinity).bits, 0x7e);
  EXPECT_EQ(to_float8_e4m3(-kInfinity).bits, 0xfe);
  // Any payload, also those whose upper half alone would be an infinity, and both signs.
  for (const std::uint32_t payload : {1U, 0xffffU, 0x10000U, 0x400000U, 0x7fffffU}) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const float nan = float_of(sign | 0x7f800000U | payload);
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(nan))));
      EXPECT_TRUE(std::isnan(to_float(to_float16(nan))));
      EXPECT_EQ(to_float8_e4m3(nan).bits, 0x7f);
    }
  }
}

#if defined(__FLT16_MAX__)
TEST(Numeric, AgreesWithTheCompilersHalfPrecision) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto theirs = static_cast<float>(std::bit_cast<_Float16>(bits));
    const float ours = to_float(float16{bits});
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(ours));
    } else {
      ASSERT_EQ(bits_of(ours), bits_of(theirs)) << std::hex << bits;
    }
  }
  for (const float value : hard_floats(kFloat16s)) {
    ASSERT_EQ(to_float16(value).bits, std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)))
        << std::hexfloat << value;
  }
}
#endif

TEST(Numeric, ConversionsAreConstantExpressions) {
  static_assert(to_bfloat16(1.0F).bits == 0x3f80);
  static_assert(to_float16(1.0F).bits == 0x3c00);
  static_assert(to_float8_e4m3(1.0F).bits == 0x38);
  static_assert(to_float(float16{0x0001}) == 0x1p-24F);
  static_assert(to_float(float8_e4m3{0x01}) == 0x1p-9F);
  static_assert(fp8_scale(448.0F, Format::kFp8).dequantise == 1.0F);
  static_assert(to_ue8m0(1.0F) == 127);
}

TEST(Fp8Scale, MapsTheLargestMagnitudeTo448) {
  for (const float amax : {1.0F, 448.0F, 3.25F, 1e-4F, 1e30F, std::numeric_limits<float>::max()}) {
    const Fp8Scale scale = fp8_scale(amax, Format::kFp8);
    EXPECT_EQ(scale.dequantise, amax / 448.0F);
    EXPECT_EQ(scale.quantise, 448.0F / amax);
    EXPECT_EQ(to_float8_e4m3(amax * scale.quantise).bits, 0x7e);
  }
}

TEST(Fp8Scale, FloorsTheLargestMagnitude) {
  for (const float amax : {0.0F, 1e-30F, 9.9e-5F, 1e-4F}) {
    EXPECT_EQ(fp8_scale(amax, Format::kFp8).dequantise, 1e-4F / 448.0F);
    EXPECT_EQ(fp8_scale(amax, Format::kFp8Pow2).dequantise, 0x1p-22F);
  }
  EXPECT_GT(fp8_scale(1.1e-4F, Format::kFp8).dequantise, 1e-4F / 448.0F);
}

TEST(Fp8Scale, PowersOfTwoAreTheNextOneUpAndNoValueOverflows) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> exponent(-13.2F, 127.9F);
  for (int i = 0; i < 100'000; ++i) {
    const float amax = std::exp2(exponent(random));
    const float scale = amax / 448.0F;
    for (const Format format : {Format::kFp8Pow2, Format::kFp8Ue8m0}) {
      const Fp8Scale rounded = fp8_scale(amax, format);
      int power = 0;
      ASSERT_EQ(std::frexp(rounded.dequantise, &power), 0.5F);  // a power of two
      ASSERT_GE(rounded.dequantise, scale);
      ASSERT_LT(rounded.dequantise / 2, scale);
      ASSERT_EQ(rounded.quantise * rounded.dequantise, 1.0F);
      ASSERT_LT(amax * rounded.quantise, 464.0F);
      ASSERT_EQ(from_ue8m0(to_ue8m0(rounded.dequantise)), rounded.dequantise);
    }
    ASSERT_LT(amax * fp8_scale(amax, Format::kFp8).quantise, 464.0F);
  }
}

TEST(Fp8Scale, NanAndInfinityMakeEveryValueNan) {
  for (const Format format : {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    for (const float amax : {kNan, kInfinity}) {
      const Fp8Scale scale = fp8_scale(amax, format);
      for (const float x : {0.0F, -1.0F, 3e38F, kInfinity, kNan}) {
        const float value = to_float(to_float8_e4m3(x * scale.quantise));
        const float received =
            format == Format::kFp8Ue8m0 ? from_ue8m0(to_ue8m0(scale.dequantise)) : scale.dequantise;
        EXPECT_TRUE(std::isnan(value * received));
      }
    }
  }
}

TEST(Ue8m0, HoldsEveryPowerOfTwo) {
  for (int byte = 0; byte < 255; ++byte) {
    const float power = std::ldexp(1.0F, byte - 127);
    EXPECT_EQ(to_ue8m0(power), byte);
    EXPECT_EQ(from_ue8m0(static_cast<std::uint8_t>(byte)), power);
  }
  EXPECT_EQ(to_ue8m0(kInfinity), 255);
  EXPECT_EQ(to_ue8m0(kNan), 255);
  EXPECT_TRUE(std::isnan(from_ue8m0(255)));
}

}  // namespace
}  // namespace tandem
