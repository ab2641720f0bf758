// The SIMD row operations against numeric.h, bit for bit, on every target that this CPU has.
#include "backend/cpu/row_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tandem/numeric.h"

namespace tandem::cpu {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::byte kGuard{0xa5};
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr Format kFp8Formats[] = {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0};
constexpr StoreKind kStoreKinds[] = {StoreKind::kCached, StoreKind::kWhole, StoreKind::kStreaming};

std::vector<int> hidden_sizes() {
  std::vector<int> sizes;
  for (int hidden = 1; hidden <= 300; ++hidden) sizes.push_back(hidden);
  sizes.insert(sizes.end(), {1000, 2880, 7168});
  return sizes;
}

template <typename T>
T read(const std::byte* bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes + index * sizeof(T), sizeof(T));
  return value;
}

float read_float(const std::byte* bytes, DType dtype, std::size_t index) {
  if (dtype == DType::kBFloat16) return to_float(read<bfloat16>(bytes, index));
  if (dtype == DType::kFloat16) return to_float(read<float16>(bytes, index));
  return read<float>(bytes, index);
}

void write_float(std::byte* bytes, DType dtype, std::size_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes + index * sizeof(float), &value, sizeof(float));
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kBFloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
  std::memcpy(bytes + index * sizeof(bits), &bits, sizeof(bits));
}

// Are two elements of `dtype` the same bits, or both NaN?
bool same(const std::byte* a, const std::byte* b, DType dtype, std::size_t index) {
  const std::size_t size = size_of(dtype);
  if (std::memcmp(a + index * size, b + index * size, size) == 0) return true;
  return std::isnan(read_float(a, dtype, index)) && std::isnan(read_float(b, dtype, index));
}

// The wire form of a row by numeric.h, value by value. Padding is kGuard.
Bytes expected_row(const std::byte* x, DType dtype, const layout::RowShape& row) {
  Bytes out(row.pitch(), kGuard);
  if (!is_fp8(row.format)) {
    std::memcpy(out.data(), x, row.value_bytes());
    return out;
  }
  std::fill_n(out.begin() + row.scales_offset(), 4 * row.num_scales(), std::byte{0});
  for (int group = 0; group * kFp8GroupSize < row.hidden; ++group) {
    const int begin = group * kFp8GroupSize;
    const int end = std::min(begin + kFp8GroupSize, row.hidden);
    std::uint32_t amax = 0;
    for (int h = begin; h < end; ++h) {
      amax = std::max(amax, std::bit_cast<std::uint32_t>(read_float(x, dtype, h)) & 0x7fffffffU);
    }
    const Fp8Scale scale = fp8_scale(std::bit_cast<float>(amax), row.format);
    for (int h = begin; h < end; ++h) {
      out[h] = std::byte{to_float8_e4m3(read_float(x, dtype, h) * scale.quantise).bits};
    }
    std::byte* const scales = out.data() + row.scales_offset();
    if (row.format == Format::kFp8Ue8m0) {
      scales[group] = std::byte{to_ue8m0(scale.dequantise)};
    } else {
      std::memcpy(scales + 4 * group, &scale.dequantise, 4);
    }
  }
  return out;
}

void expect_row(const Bytes& actual, const std::byte* x, DType dtype, const layout::RowShape& row) {
  const Bytes expected = expected_row(x, dtype, row);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool in_values = i < static_cast<std::size_t>(row.value_bytes());
    const bool in_scales = i >= static_cast<std::size_t>(row.scales_offset()) &&
                           i < static_cast<std::size_t>(row.scales_offset()) + 4 * row.num_scales();
    if (in_scales && row.format != Format::kFp8Ue8m0) {
      const std::size_t scale = (i - row.scales_offset()) / 4;
      ASSERT_TRUE(same(actual.data() + row.scales_offset(), expected.data() + row.scales_offset(),
                       DType::kFloat32, scale))
          << "scale " << scale;
    } else if (in_values || in_scales) {
      ASSERT_EQ(actual[i], expected[i])
          << (in_values ? "value " : "scale ") << i << " of H " << row.hidden << ", x "
          << (is_fp8(row.format) && in_values ? read_float(x, dtype, i) : 0.0F);
    }
  }
}

// Magnitudes over many binades, so that groups meet normal, subnormal and vanishing results.
Bytes random_values(DType dtype, std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-14, 2);
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    write_float(bytes.data(), dtype, i, std::ldexp(normal(random), exponent(random)));
  }
  return bytes;
}

class RowOps : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    best_ = simd_targets().front();
    ASSERT_TRUE(use_simd_target(GetParam()));
    ASSERT_EQ(simd_targets().front(), GetParam());
  }
  void TearDown() override { use_simd_target(best_); }

  std::mt19937 random_{20260101};

 private:
  std::string best_;
};

INSTANTIATE_TEST_SUITE_P(Targets, RowOps, testing::ValuesIn(simd_targets()),
                         [](const auto& param) { return param.param; });

TEST(SimdTargets, UnknownNameChangesNothing) {
  const std::vector<std::string> before = simd_targets();
  EXPECT_FALSE(use_simd_target("no such target"));
  EXPECT_EQ(simd_targets(), before);
}

TEST_P(RowOps, EncodesEveryHiddenSizeAndFormat) {
  for (const DType dtype : kDTypes) {
    for (const int hidden : hidden_sizes()) {
      const std::size_t size = size_of(dtype);
      // One element further than allocated memory's alignment: x is aligned to its dtype only.
      Bytes memory = random_values(dtype, hidden + 1, random_);
      const std::byte* const x = memory.data() + size;
      std::vector<Format> formats{std::begin(kFp8Formats), std::end(kFp8Formats)};
      formats.push_back(static_cast<Format>(dtype));
      for (const Format format : formats) {
        const layout::RowShape row{hidden, format};
        Bytes out(row.pitch(), kGuard);
        encode_row(x, dtype, row, out.data());
        expect_row(out, x, dtype, row);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowOps, QuantisesEveryBfloat16AndFloat16) {
  // Groups of neighbours in value (normal results) and of all magnitudes (subnormal, vanishing).
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int stride : {1, 513}) {  // odd: a permutation of all patterns
      std::vector<std::uint16_t> patterns(65536);
      for (std::uint32_t i = 0; i < patterns.size(); ++i) {
        patterns[i] = static_cast<std::uint16_t>(i * stride);
      }
      const auto* const x = reinterpret_cast<const std::byte*>(patterns.data());
      for (const Format format : kFp8Formats) {
        const layout::RowShape row{65536, format};
        Bytes out(row.pitch(), kGuard);
        encode_row(x, dtype, row, out.data());
        expect_row(out, x, dtype, row);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowOps, QuantisesEveryFiniteBfloat16UnderOneScale) {
  // A fixed largest value per group, against which every finite pattern no larger is quantised.
  for (const float largest : {448.0F, 1.0F, 3.1415F, 1e-4F, 0x1p100F, 1e30F}) {
    std::vector<std::uint16_t> patterns;
    const bfloat16 top = to_bfloat16(largest);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      if ((bits & 0x7fffU) > top.bits) continue;
      if (patterns.size() % kFp8GroupSize == 0) patterns.push_back(top.bits);
      patterns.push_back(static_cast<std::uint16_t>(bits));
    }
    for (std::size_t begin = 0; begin < patterns.size(); begin += 32768) {
      const auto count = static_cast<int>(std::min<std::size_t>(32768, patterns.size() - begin));
      const auto* const x = reinterpret_cast<const std::byte*>(patterns.data() + begin);
      for (const Format format : kFp8Formats) {
        const layout::RowShape row{count, format};
        Bytes out(row.pitch(), kGuard);
        encode_row(x, DType::kBFloat16, row, out.data());
        expect_row(out, x, DType::kBFloat16, row);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowOps, NanAndInfinityStayInTheirGroup) {
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()};
  for (const DType dtype : kDTypes) {
    for (const float special : specials) {
      for (const int hidden : {5, 128, 300}) {
        Bytes x = random_values(dtype, hidden, random_);
        const int position = hidden > 128 ? 131 : hidden - 1;
        write_float(x.data(), dtype, position, special);
        for (const Format format : kFp8Formats) {
          const layout::RowShape row{hidden, format};
          Bytes out(row.pitch(), kGuard);
          encode_row(x.data(), dtype, row, out.data());
          expect_row(out, x.data(), dtype, row);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(RowOps, ZeroAndQuietGroupsKeepTheirSigns) {
  for (const DType dtype : kDTypes) {
    Bytes x(300 * size_of(dtype));
    for (int h = 0; h < 300; ++h) {
      const float value = h < 128 ? (h % 2 == 0 ? 0.0F : -0.0F) : (h % 2 == 0 ? 1e-7F : -2e-8F);
      write_float(x.data(), dtype, h, value);
    }
    for (const Format format : kFp8Formats) {
      const layout::RowShape row{300, format};
      Bytes out(row.pitch(), kGuard);
      encode_row(x.data(), dtype, row, out.data());
      expect_row(out, x.data(), dtype, row);
      EXPECT_EQ(out[0], std::byte{0});
      EXPECT_EQ(out[1], std::byte{0x80});
    }
  }
}

TEST_P(RowOps, ScatterWritesEveryDestinationAndNothingElse) {
  for (const StoreKind kind : kStoreKinds) {
    for (const Format format :
         {Format::kBFloat16, Format::kFloat32, Format::kFp8, Format::kFp8Ue8m0}) {
      const DType dtype = is_fp8(format) ? DType::kBFloat16 : value_dtype(format);
      for (const int hidden : {1, 7, 32, 96, 130, 1000, 7168}) {
        for (const int offset : {0, 16, 48}) {  // 16-byte alignment is all that is promised
          const layout::RowShape row{hidden, format};
          const Bytes x = random_values(dtype, hidden, random_);
          for (const std::size_t num_rows : {0, 1, 3, 8}) {
            const std::size_t stride = row.pitch() + 64 + 16;
            Bytes memory(num_rows * stride + 128, kGuard);
            std::byte* const base =
                memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
            std::vector<std::byte*> destinations;
            for (std::size_t i = 0; i < num_rows; ++i) {
              destinations.push_back(base + offset + i * stride);
            }
            scatter_row(x.data(), dtype, row, destinations, kind);
            finish_streaming();
            for (std::byte* const out : destinations) {
              expect_row(Bytes(out, out + row.pitch()), x.data(), dtype, row);
              if (HasFatalFailure()) return;
              std::fill_n(out, row.pitch(), kGuard);
            }
            EXPECT_TRUE(std::all_of(memory.begin(), memory.end(),
                                    [](std::byte byte) { return byte == kGuard; }));
          }
        }
      }
    }
  }
}

TEST_P(RowOps, StreamingScatterOnLinesIsExact) {
  const layout::RowShape row{1000, Format::kBFloat16};  // 31 lines and a bit
  const Bytes x = random_values(DType::kBFloat16, row.hidden, random_);
  Bytes memory(9 * 2048, kGuard);
  std::byte* const base =
      memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  std::vector<std::byte*> destinations;
  for (int i = 0; i < 8; ++i) destinations.push_back(base + i * 2048);
  scatter_row(x.data(), DType::kBFloat16, row, destinations, StoreKind::kStreaming);
  finish_streaming();
  for (std::byte* const out : destinations) {
    EXPECT_EQ(std::memcmp(out, x.data(), 2000), 0);
    EXPECT_TRUE(std::all_of(out + 2000, out + 2048, [](std::byte b) { return b == kGuard; }));
  }
}

TEST_P(RowOps, CopiesAnySizeAtAnyAlignment) {
  Bytes source(3000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random_());
  for (const StoreKind kind : kStoreKinds) {
    for (const std::size_t size : {0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 1000, 2600}) {
      for (const std::size_t to : {0, 1, 16, 63}) {
        for (const std::size_t from : {0, 2, 33}) {
          Bytes memory(3000, kGuard);
          copy_bytes(memory.data() + 64 + to, source.data() + from, size, kind);
          finish_streaming();
          Bytes expected(3000, kGuard);
          std::copy_n(source.begin() + from, size, expected.begin() + 64 + to);
          ASSERT_EQ(memory, expected) << size << " bytes from " << from << " to " << to;
        }
      }
    }
  }
  copy_bytes(nullptr, nullptr, 0, StoreKind::kStreaming);
}

Bytes expected_combination(const std::vector<const std::byte*>& rows,
                           const std::vector<float>& weights, DType dtype, int hidden) {
  Bytes out(hidden * size_of(dtype));
  for (int h = 0; h < hidden; ++h) {
    float sum = 0.0F;
    for (std::size_t k = 0; k < rows.size(); ++k) {
      const volatile float product = weights[k] * read_float(rows[k], dtype, h);  // rounded
      sum = sum + product;
    }
    write_float(out.data(), dtype, h, sum);
  }
  return out;
}

// Combines rows that begin on 16 bytes into an `out` that is aligned to its dtype only.
void check_combination(const std::vector<const std::byte*>& rows, const std::vector<float>& weights,
                       DType dtype, int hidden) {
  const std::size_t size = size_of(dtype);
  Bytes memory((hidden + 2) * size, kGuard);
  std::byte* const out = memory.data() + size;
  combine_row(rows, weights, dtype, hidden, out);
  const Bytes expected = expected_combination(rows, weights, dtype, hidden);
  for (int h = 0; h < hidden; ++h) {
    ASSERT_TRUE(same(out, expected.data(), dtype, h))
        << "channel " << h << " of " << hidden << ", " << rows.size() << " rows, dtype "
        << static_cast<int>(dtype) << ": " << read_float(out, dtype, h) << " for "
        << read_float(expected.data(), dtype, h);
  }
  for (std::size_t i = 0; i < size; ++i) {
    ASSERT_EQ(memory[i], kGuard);
    ASSERT_EQ(memory[memory.size() - 1 - i], kGuard);
  }
}

TEST_P(RowOps, CombinesEveryHiddenSize) {
  std::normal_distribution<float> normal;
  for (const DType dtype : kDTypes) {
    for (const int hidden : hidden_sizes()) {
      for (const int num_rows : {0, 1, 3, 8}) {
        if (num_rows == 3 && hidden > 1000) continue;
        std::vector<Bytes> values;
        std::vector<const std::byte*> rows;
        std::vector<float> weights;
        for (int k = 0; k < num_rows; ++k) {
          values.push_back(random_values(dtype, hidden, random_));
          weights.push_back(normal(random_));
        }
        for (const Bytes& row : values) rows.push_back(row.data());
        check_combination(rows, weights, dtype, hidden);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowOps, CombinesEveryNumberOfRows) {
  std::normal_distribution<float> normal;
  for (const DType dtype : kDTypes) {
    for (const int hidden : {3, 77, 1000}) {
      std::vector<Bytes> values;
      for (int k = 0; k < kMaxTopk; ++k) values.push_back(random_values(dtype, hidden, random_));
      std::vector<const std::byte*> rows;
      std::vector<float> weights;
      for (int k = 0; k <= kMaxTopk; ++k) {
        check_combination(rows, weights, dtype, hidden);
        if (HasFatalFailure()) return;
        if (k == kMaxTopk) break;
        rows.push_back(values[k].data());
        weights.push_back(normal(random_));
      }
    }
  }
}

TEST_P(RowOps, RoundsEveryBfloat16AndFloat16ThroughCombine) {
  // A weight of 1 must return each pattern; the others round, underflow and overflow.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::uint16_t> patterns(65536);
    for (std::uint32_t i = 0; i < patterns.size(); ++i) {
      patterns[i] = static_cast<std::uint16_t>(i);
    }
    const auto* const row = reinterpret_cast<const std::byte*>(patterns.data());
    for (const float weight :
         {1.0F, 0.3333333F, -1.9999F, 0x1.008p0F, 0x1.018p0F, 0x1.8p-9F, 0x1p-14F}) {
      check_combination({row}, {weight}, dtype, 65536);
      if (HasFatalFailure()) return;
      check_combination({row, row}, {weight, weight * 0.7F}, dtype, 65536);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(RowOps, CombineRoundsProductsBeforeSums) {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the product drops 2^-24, which a fused operation keeps.
  const float factor = 1.0F + 0x1p-12F;
  const float first = 1.0F + 0x1p-11F;
  ASSERT_NE(std::fma(factor, factor, -first), 0.0F);
  for (const int hidden : {1, 16, 64, 100, 256}) {
    const std::vector<float> a(hidden, -first);
    const std::vector<float> b(hidden, factor);
    std::vector<float> out(hidden, 1.0F);
    const std::vector<const std::byte*> rows{reinterpret_cast<const std::byte*>(a.data()),
                                             reinterpret_cast<const std::byte*>(b.data())};
    const std::vector<float> weights{1.0F, factor};
    combine_row(rows, weights, DType::kFloat32, hidden, reinterpret_cast<std::byte*>(out.data()));
    EXPECT_EQ(out, std::vector<float>(hidden, 0.0F)) << "hidden " << hidden;
  }
}

TEST_P(RowOps, CombineStartsFromPositiveZero) {
  const std::vector<float> zeros(100, -0.0F);
  std::vector<float> out(100, 1.0F);
  const std::vector<const std::byte*> rows{reinterpret_cast<const std::byte*>(zeros.data())};
  const std::vector<float> weights{1.0F};
  combine_row(rows, weights, DType::kFloat32, 100, reinterpret_cast<std::byte*>(out.data()));
  for (const float value : out) EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0U);
}

TEST_P(RowOps, CombineCarriesNanAndInfinity) {
  for (const DType dtype : kDTypes) {
    const float infinity = std::numeric_limits<float>::infinity();
    Bytes a = random_values(dtype, 200, random_);
    Bytes b = random_values(dtype, 200, random_);
    for (const int h : {0, 17, 130, 199}) {
      write_float(a.data(), dtype, h, std::numeric_limits<float>::quiet_NaN());
      write_float(b.data(), dtype, h == 0 ? 1 : h - 1, h % 2 == 0 ? infinity : -infinity);
    }
    write_float(a.data(), dtype, 60, infinity);
    write_float(b.data(), dtype, 60, -infinity);  // their sum is NaN
    check_combination({a.data(), b.data()}, {0.5F, 0.5F}, dtype, 200);
    check_combination({a.data(), b.data()}, {0.0F, 1e30F}, dtype, 200);
  }
}

}  // namespace
}  // namespace tandem::cpu
