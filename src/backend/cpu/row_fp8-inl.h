// Quantisation of a row to fp8 e4m3 with a scale for each group of 128 channels (docs/formats.md).
//
// Included once per target (Highway's convention for -inl.h files).
#if defined(TANDEM_BACKEND_CPU_ROW_FP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKEND_CPU_ROW_FP8_INL_H_
#undef TANDEM_BACKEND_CPU_ROW_FP8_INL_H_
#else
#define TANDEM_BACKEND_CPU_ROW_FP8_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <span>

#include "backend/cpu/row_vectors-inl.h"
#include "layout/row.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// e4m3 of non-negative finite values below 464, from where rounding would overflow.
HWY_INLINE Words encode_e4m3(Floats values) {
  const Words bits = bits_of(values);
  const Words last = hn::And(hn::ShiftRight<20>(bits), word(1));
  const Words normal =
      hn::ShiftRight<20>(hn::Add(hn::Add(bits, word(0x7ffffU - (120U << 23))), last));
  // The last place of 2^14 is 2^-9, that of e4m3's subnormals.
  const Words subnormal =
      hn::Sub(bits_of(hn::Add(values, hn::Set(F32(), 0x1p14F))), word(0x46800000));
  return select(hn::Lt(values, hn::Set(F32(), 0x1p-6F)), subnormal, normal);
}

constexpr std::size_t kGroup = kFp8GroupSize;

// Any group into one place: how the scalar target does it, and every target a NaN or an infinity.
template <DType kDType>
void quantise_plainly(const std::byte* x, float quantise, std::byte* out) {
  for (std::size_t i = 0; i < kGroup; ++i) {
    const float value = scalar_value<kDType>(x + i * size_of(kDType));
    out[i] = static_cast<std::byte>(to_float8_e4m3(value * quantise).bits);
  }
}

#if HWY_TARGET == HWY_SCALAR

template <DType kDType>
std::uint32_t group_amax(const std::byte* x) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < kGroup; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(scalar_value<kDType>(x + i * size_of(kDType)));
    largest = std::max(largest, bits & 0x7fffffffU);
  }
  return largest;
}

template <DType kDType>
void scatter_group(const std::byte* x, float quantise, std::size_t offset,
                   std::span<std::byte* const> destinations) {
  std::byte codes[kGroup];
  quantise_plainly<kDType>(x, quantise, codes);
  for (std::byte* const out : destinations) std::memcpy(out + offset, codes, kGroup);
}

#else

using U16 = hn::Repartition<std::uint16_t, U32>;
using I16 = hn::Repartition<std::int16_t, U32>;

HWY_INLINE Floats absolute(Floats values) {
  return floats_of(hn::And(bits_of(values), word(0x7fffffff)));
}

// e4m3 codes of a pair, in 16-bit lanes in the order of channels.
template <DType kDType>
HWY_INLINE hn::Vec<U16> quantise_pair(const std::byte* x, Floats factor) {
  if constexpr (kDType == DType::kBFloat16) {
    const Words words = load(U32(), x);
    const Floats even = floats_of(hn::And(hn::ShiftLeft<16>(words), word(0x7fffffff)));
    const Floats odd = floats_of(hn::And(words, word(0x7fff0000)));
    const Words codes = hn::Or(encode_e4m3(hn::Mul(even, factor)),
                               hn::ShiftLeft<16>(encode_e4m3(hn::Mul(odd, factor))));
    const Words signs = hn::And(hn::ShiftRight<8>(words), word(0x00800080));
    return hn::BitCast(U16(), hn::Or(codes, signs));
  } else {
    const Pair pair = load_pair<kDType>(x);
    Words codes[2] = {bits_of(pair.first), bits_of(pair.second)};
    for (Words& code : codes) {
      const Words sign = hn::And(hn::ShiftRight<24>(code), word(0x80));
      code = hn::Or(encode_e4m3(hn::Mul(absolute(floats_of(code)), factor)), sign);
    }
    return hn::ConcatEven(U16(), hn::BitCast(U16(), codes[1]), hn::BitCast(U16(), codes[0]));
  }
}

// Largest magnitude of a group, as a float's bits: they order like the magnitudes, NaN above all.
template <DType kDType>
HWY_INLINE std::uint32_t group_amax(const std::byte* x) {
  constexpr std::size_t kStep = kPair * size_of(kDType);
  hn::Vec<I32> largest = hn::Zero(I32());
  if constexpr (kDType == DType::kBFloat16) {
    hn::Vec<I16> halves = hn::Zero(I16());
    for (std::size_t i = 0; i < kGroup / kPair; ++i) {
      halves = hn::Max(halves, hn::And(load(I16(), x + i * kStep), hn::Set(I16(), 0x7fff)));
    }
    const hn::Vec<I32> words = hn::BitCast(I32(), halves);
    largest = hn::Max(hn::ShiftLeft<16>(words), hn::And(words, hn::Set(I32(), 0x7fff0000)));
  } else {
    for (std::size_t i = 0; i < kGroup / kPair; ++i) {
      const Pair pair = load_pair<kDType>(x + i * kStep);
      largest = hn::Max(largest, hn::BitCast(I32(), absolute(pair.first)));
      largest = hn::Max(largest, hn::BitCast(I32(), absolute(pair.second)));
    }
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), largest)));
}

// A group of finite values, in registers from the first load to the last store: bytes stored in
// parts of a vector could not be forwarded to the loads that would copy them.
template <DType kDType>
HWY_INLINE void scatter_group(const std::byte* x, float quantise, std::size_t offset,
                              std::span<std::byte* const> destinations) {
  constexpr std::size_t kStep = kPair * size_of(kDType);
  constexpr std::size_t kVectors = kGroup / (2 * kPair);
  const Floats factor = hn::Set(F32(), quantise);
  hn::Vec<Bytes> codes[kVectors];
  for (std::size_t i = 0; i < kVectors; ++i) {
    const auto low = quantise_pair<kDType>(x + 2 * i * kStep, factor);
    const auto high = quantise_pair<kDType>(x + (2 * i + 1) * kStep, factor);
    codes[i] = hn::ConcatEven(Bytes(), hn::BitCast(Bytes(), high), hn::BitCast(Bytes(), low));
  }
  for (std::byte* const out : destinations) {
    for (std::size_t i = 0; i < kVectors; ++i) {
      store(Bytes(), codes[i], out + offset + i * 2 * kPair);
    }
  }
}

#endif

// Writes each group to all destinations as soon as it is quantised: its stores drain while the next
// group is computed.
template <DType kDType>
void scatter_fp8(const std::byte* x, const layout::RowShape& row,
                 std::span<std::byte* const> destinations) {
  constexpr std::size_t kSize = size_of(kDType);
  const auto hidden = static_cast<std::size_t>(row.hidden);
  alignas(64) std::byte padded[kGroup * kSize];  // a short last group, zeros behind it
  alignas(64) std::byte codes[kGroup];           // of a group that goes round by memory
  alignas(64) std::byte scales[sizeof(float) * kMaxHidden / kGroup];
  std::byte* const codes_only[] = {codes};
  for (std::size_t begin = 0, group = 0; begin < hidden; begin += kGroup, ++group) {
    const std::byte* source = x + begin * kSize;
    const std::size_t count = std::min(kGroup, hidden - begin);
    if (count < kGroup) {
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, source, count * kSize);
      source = padded;
    }
    const std::uint32_t amax = group_amax<kDType>(source);
    const Fp8Scale scale = fp8_scale(std::bit_cast<float>(amax), row.format);
    const bool is_finite = amax < 0x7f800000U;
    if (is_finite && count == kGroup) {
      scatter_group<kDType>(source, scale.quantise, begin, destinations);
    } else {
      if (is_finite) {
        scatter_group<kDType>(source, scale.quantise, 0, codes_only);
      } else {
        quantise_plainly<kDType>(source, scale.quantise, codes);
      }
      for (std::byte* const out : destinations) std::memcpy(out + begin, codes, count);
    }
    if (row.format == Format::kFp8Ue8m0) {
      if (group % 4 == 0) std::memset(scales + group, 0, 4);  // spare bytes of the last word
      scales[group] = static_cast<std::byte>(to_ue8m0(scale.dequantise));
    } else {
      std::memcpy(scales + sizeof(float) * group, &scale.dequantise, sizeof(float));
    }
  }
  const std::size_t scale_bytes = sizeof(float) * static_cast<std::size_t>(row.num_scales());
  for (std::byte* const out : destinations) {
    std::memcpy(out + row.scales_offset(), scales, scale_bytes);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();

#endif
