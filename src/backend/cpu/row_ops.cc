// SIMD versions of numeric.h, compiled once per target by Highway's foreach_target and chosen at
// run time (static dispatch would be scalar code on x86-64's baseline).
//
// The unit of work is a Pair: two vectors of float32 from one contiguous run of channels. bf16
// comes as 32-bit words that hold an even and an odd channel, so widening is a shift and a mask and
// needs no shuffle. Roundings are written out in integers, or by adding a power of two whose last
// place is the wanted one: Highway 1.0.3's own float -> bf16 truncates, as does its emulated
// float -> fp16.
#include "backend/cpu/row_ops.h"

// Vectors lie in arrays and structs here, which the scalable targets do not allow.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/row_ops.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which must see HWY_TARGET_INCLUDE first.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstring>

#include "tandem/numeric.h"

#ifndef TANDEM_CPU_ROW_KERNELS
#define TANDEM_CPU_ROW_KERNELS
namespace tandem::cpu {

// What one target offers.
struct RowKernels {
  const char* name;
  void (*copy_cached)(std::byte* destination, const std::byte* source, std::size_t num_bytes);
  void (*copy_streaming)(std::byte* destination, const std::byte* source, std::size_t num_bytes);
  void (*scatter_streaming)(const std::byte* source, std::size_t num_bytes,
                            std::span<std::byte* const> destinations);
  // By dtype of x: bf16, fp16, fp32.
  void (*scatter_fp8[3])(const std::byte* x, const layout::RowShape& row,
                         std::span<std::byte* const> destinations);
  // By dtype of rows and out.
  void (*combine[3])(std::span<const std::byte* const> rows, const float* weights, int hidden,
                     std::byte* out);
};

// Streaming stores write whole lines, so that the processor never reads what is overwritten.
inline constexpr std::size_t kLine = 64;

inline bool are_on_lines(std::span<std::byte* const> addresses) {
  return std::all_of(addresses.begin(), addresses.end(), [](const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % kLine == 0;
  });
}

}  // namespace tandem::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<std::uint32_t>;
using I32 = hn::ScalableTag<std::int32_t>;
using U16Half = hn::Rebind<std::uint16_t, U32>;
using Bytes = hn::ScalableTag<std::uint8_t>;
using F16Half = hn::Rebind<hwy::float16_t, F32>;
using Floats = hn::Vec<F32>;
using Words = hn::Vec<U32>;

constexpr std::size_t kLanes = hn::MaxLanes(F32());
constexpr std::size_t kPair = 2 * kLanes;  // channels of a Pair
#if HWY_TARGET == HWY_SCALAR
constexpr bool kScalar = true;
#else
constexpr bool kScalar = false;
#endif
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
constexpr bool kHasF16 = true;  // F16C: exact both ways, to nearest even by its immediate operand
#else
constexpr bool kHasF16 = false;
#endif

// Lanes of D from or to memory of any alignment and type.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const std::byte* source) {
  if constexpr (kScalar) {
    hn::TFromD<D> lane;
    std::memcpy(&lane, source, sizeof(lane));
    return hn::Set(d, lane);
  } else {
    const hn::Repartition<std::uint8_t, D> bytes;
    return hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(source)));
  }
}

template <class D>
HWY_INLINE void store(D /*tag*/, hn::Vec<D> values, std::byte* destination) {
  if constexpr (kScalar) {
    const hn::TFromD<D> lane = hn::GetLane(values);
    std::memcpy(destination, &lane, sizeof(lane));
  } else {
    const hn::Repartition<std::uint8_t, D> bytes;
    hn::StoreU(hn::BitCast(bytes, values), bytes, reinterpret_cast<std::uint8_t*>(destination));
  }
}

HWY_INLINE Words bits_of(Floats values) { return hn::BitCast(U32(), values); }
HWY_INLINE Floats floats_of(Words bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE Words word(std::uint32_t value) { return hn::Set(U32(), value); }
HWY_INLINE Words select(hn::Mask<F32> mask, Words yes, Words no) {
  return bits_of(hn::IfThenElse(mask, floats_of(yes), floats_of(no)));
}

// --- fp16 ---------------------------------------------------------------------------------------

HWY_INLINE Floats load_fp16(const std::byte* source) {
  if constexpr (kHasF16) {
    return hn::PromoteTo(F32(), load(F16Half(), source));
  } else {
    const Words half = hn::PromoteTo(U32(), load(U16Half(), source));
    const Words magnitude = hn::And(half, word(0x7fff));
    const Words sign = hn::ShiftLeft<16>(hn::And(half, word(0x8000)));
    const Words normal = hn::Add(hn::ShiftLeft<13>(magnitude), word(112U << 23));
    // Infinity and NaN: another 112 takes the exponent from 143 to 255.
    const Floats value = hn::ConvertTo(F32(), hn::BitCast(I32(), magnitude));
    const Words special = hn::Add(normal, word(112U << 23));
    const Words subnormal = bits_of(hn::Mul(value, hn::Set(F32(), 0x1p-24F)));
    Words result = select(hn::Lt(value, hn::Set(F32(), 0x400)), subnormal, normal);
    result = select(hn::Ge(value, hn::Set(F32(), 0x7c00)), special, result);
    return floats_of(hn::Or(result, sign));
  }
}

HWY_INLINE void store_fp16(Floats values, std::byte* destination) {
  if constexpr (kHasF16) {
    store(F16Half(), hn::DemoteTo(F16Half(), values), destination);
  } else {
    const Words bits = bits_of(values);
    const Words magnitude = hn::And(bits, word(0x7fffffff));
    const Words sign = hn::And(hn::ShiftRight<16>(bits), word(0x8000));
    // 65520 and more rounds to infinity by the carry; infinity and NaN are kept out of the sum.
    const Floats absolute = floats_of(magnitude);
    const Words last = hn::And(hn::ShiftRight<13>(magnitude), word(1));
    const Words normal =
        hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, word(0xfffU - (112U << 23))), last));
    // The last place of 0.5 is 2^-24, that of fp16's subnormals.
    const Words subnormal =
        hn::Sub(bits_of(hn::Add(absolute, hn::Set(F32(), 0.5F))), word(0x3f000000));
    Words result = select(hn::Lt(absolute, hn::Set(F32(), 0x1p-14F)), subnormal, normal);
    result = select(hn::Ge(absolute, hn::Set(F32(), 65520.0F)), word(0x7c00), result);
    result = select(hn::Ne(absolute, absolute), word(0x7e00), result);
    result = hn::Or(result, sign);
    // At most 0xffff, so the saturating conversion keeps every bit.
    store(U16Half(), hn::DemoteTo(U16Half(), hn::BitCast(I32(), result)), destination);
  }
}

// --- Pairs --------------------------------------------------------------------------------------

struct Pair {
  Floats first;   // bf16: even channels; else the lower half
  Floats second;  // bf16: odd channels; else the upper half
};

template <DType kDType>
HWY_INLINE Pair load_pair(const std::byte* source) {
  if constexpr (kDType == DType::kBFloat16) {
    const Words words = load(U32(), source);
    return {floats_of(hn::ShiftLeft<16>(words)), floats_of(hn::And(words, word(0xffff0000)))};
  } else if constexpr (kDType == DType::kFloat16) {
    return {load_fp16(source), load_fp16(source + 2 * kLanes)};
  } else {
    return {load(F32(), source), load(F32(), source + 4 * kLanes)};
  }
}

// bf16 in the upper half of each word; the lower half is rubbish.
HWY_INLINE Words round_bf16(Floats values) {
  const Words bits = bits_of(values);
  const Words last = hn::And(hn::ShiftRight<16>(bits), word(1));
  const Words rounded = hn::Add(hn::Add(bits, word(0x7fff)), last);
  const Words quiet = hn::Or(bits, word(0x400000));  // NaN stays NaN
  return select(hn::Ne(values, values), quiet, rounded);
}

template <DType kDType>
HWY_INLINE void store_pair(Pair pair, std::byte* destination) {
  if constexpr (kDType == DType::kBFloat16) {
    const Words even = hn::ShiftRight<16>(round_bf16(pair.first));
    const Words odd = hn::And(round_bf16(pair.second), word(0xffff0000));
    store(U32(), hn::Or(even, odd), destination);
  } else if constexpr (kDType == DType::kFloat16) {
    store_fp16(pair.first, destination);
    store_fp16(pair.second, destination + 2 * kLanes);
  } else {
    store(F32(), pair.first, destination);
    store(F32(), pair.second, destination + 4 * kLanes);
  }
}

// --- fp8 ----------------------------------------------------------------------------------------

template <DType kDType>
float scalar_value(const std::byte* x) {
  if constexpr (kDType == DType::kFloat32) {
    float value;
    std::memcpy(&value, x, sizeof(value));
    return value;
  } else {
    std::conditional_t<kDType == DType::kBFloat16, bfloat16, float16> value;
    std::memcpy(&value, x, sizeof(value));
    return to_float(value);
  }
}

template <DType kDType>
void store_scalar(float value, std::byte* out) {
  if constexpr (kDType == DType::kFloat32) {
    std::memcpy(out, &value, sizeof(value));
  } else if constexpr (kDType == DType::kBFloat16) {
    const bfloat16 narrow = to_bfloat16(value);
    std::memcpy(out, &narrow, sizeof(narrow));
  } else {
    const float16 narrow = to_float16(value);
    std::memcpy(out, &narrow, sizeof(narrow));
  }
}

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

// --- combine ------------------------------------------------------------------------------------

template <DType kDType>
HWY_INLINE void add_product(Pair& sum, Floats weight, const std::byte* row) {
  const Pair pair = load_pair<kDType>(row);
  sum.first = hn::Add(sum.first, hn::Mul(weight, pair.first));
  sum.second = hn::Add(sum.second, hn::Mul(weight, pair.second));
}

// Four pairs of channels from byte `offset` on, over all rows. Eight sums fit the 16 registers of
// SSE and AVX2; they have names because an array of them would live in memory at -O2.
template <DType kDType>
HWY_INLINE void combine_four_pairs(std::span<const std::byte* const> rows, const float* weights,
                                   std::size_t offset, std::byte* out) {
  constexpr std::size_t kStep = kPair * size_of(kDType);
  const Pair zero = {hn::Zero(F32()), hn::Zero(F32())};
  Pair a = zero;
  Pair b = zero;
  Pair c = zero;
  Pair d = zero;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const Floats weight = hn::Set(F32(), weights[k]);
    const std::byte* const row = rows[k] + offset;
    add_product<kDType>(a, weight, row);
    add_product<kDType>(b, weight, row + kStep);
    add_product<kDType>(c, weight, row + 2 * kStep);
    add_product<kDType>(d, weight, row + 3 * kStep);
  }
  store_pair<kDType>(a, out + offset);
  store_pair<kDType>(b, out + offset + kStep);
  store_pair<kDType>(c, out + offset + 2 * kStep);
  store_pair<kDType>(d, out + offset + 3 * kStep);
}

template <DType kDType>
HWY_INLINE void combine_pair(std::span<const std::byte* const> rows, const float* weights,
                             std::size_t offset, std::byte* out) {
  Pair sum = {hn::Zero(F32()), hn::Zero(F32())};
  for (std::size_t k = 0; k < rows.size(); ++k) {
    add_product<kDType>(sum, hn::Set(F32(), weights[k]), rows[k] + offset);
  }
  store_pair<kDType>(sum, out + offset);
}

template <DType kDType>
void combine(std::span<const std::byte* const> rows, const float* weights, int num_channels,
             std::byte* out) {
  constexpr std::size_t kSize = size_of(kDType);
  const auto hidden = static_cast<std::size_t>(num_channels);
  std::size_t channel = 0;
  for (; channel + 4 * kPair <= hidden; channel += 4 * kPair) {
    combine_four_pairs<kDType>(rows, weights, channel * kSize, out);
  }
  for (; channel + kPair <= hidden; channel += kPair) {
    combine_pair<kDType>(rows, weights, channel * kSize, out);
  }
  if (channel == hidden) return;
  if (hidden >= kPair) {  // the last full pair once more, further back
    combine_pair<kDType>(rows, weights, (hidden - kPair) * kSize, out);
    return;
  }
  for (; channel < hidden; ++channel) {
    float sum = 0.0F;
    for (std::size_t k = 0; k < rows.size(); ++k) {
      const float product = weights[k] * scalar_value<kDType>(rows[k] + channel * kSize);
      sum = sum + product;
    }
    store_scalar<kDType>(sum, out + channel * kSize);
  }
}

// --- copies -------------------------------------------------------------------------------------

void copy_cached(std::byte* destination, const std::byte* source, std::size_t num_bytes) {
  std::memcpy(destination, source, num_bytes);
}

#if HWY_TARGET == HWY_SCALAR
constexpr std::size_t kBlock = kLine;
#else
constexpr std::size_t kBlock = 4 * hn::MaxLanes(Bytes());  // one, two or four lines
#endif

// Streams a block from `source` to each destination, `offset` bytes on.
HWY_INLINE void stream_block(const std::byte* source, std::span<std::byte* const> destinations,
                             std::size_t offset) {
#if HWY_TARGET == HWY_SCALAR
  for (std::byte* const out : destinations) std::memcpy(out + offset, source, kBlock);
#else
  constexpr std::size_t kVector = hn::MaxLanes(Bytes());
  const hn::Vec<Bytes> a = load(Bytes(), source);
  const hn::Vec<Bytes> b = load(Bytes(), source + kVector);
  const hn::Vec<Bytes> c = load(Bytes(), source + 2 * kVector);
  const hn::Vec<Bytes> d = load(Bytes(), source + 3 * kVector);
  for (std::byte* const out : destinations) {
    auto* const lanes = reinterpret_cast<std::uint8_t*>(out + offset);
    hn::Stream(a, Bytes(), lanes);
    hn::Stream(b, Bytes(), lanes + kVector);
    hn::Stream(c, Bytes(), lanes + 2 * kVector);
    hn::Stream(d, Bytes(), lanes + 3 * kVector);
  }
#endif
}

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t num_bytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(destination) % kLine;
  const std::size_t head = std::min(num_bytes, (kLine - misaligned) % kLine);
  std::memcpy(destination, source, head);
  std::size_t i = head;
  for (; i + kBlock <= num_bytes; i += kBlock) stream_block(source + i, {&destination, 1}, i);
  std::memcpy(destination + i, source + i, num_bytes - i);
}

// Reads each block once and writes it to all destinations, if all lie on lines.
void scatter_streaming(const std::byte* source, std::size_t num_bytes,
                       std::span<std::byte* const> destinations) {
  if (!are_on_lines(destinations)) {
    for (std::byte* const out : destinations) copy_streaming(out, source, num_bytes);
    return;
  }
  std::size_t i = 0;
  for (; i + kBlock <= num_bytes; i += kBlock) stream_block(source + i, destinations, i);
  for (std::byte* const out : destinations) std::memcpy(out + i, source + i, num_bytes - i);
}

const RowKernels kKernels = {
    hwy::TargetName(HWY_TARGET),
    copy_cached,
    copy_streaming,
    scatter_streaming,
    {scatter_fp8<DType::kBFloat16>, scatter_fp8<DType::kFloat16>, scatter_fp8<DType::kFloat32>},
    {combine<DType::kBFloat16>, combine<DType::kFloat16>, combine<DType::kFloat32>},
};

const RowKernels* row_kernels() { return &kKernels; }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::cpu {
namespace {

HWY_EXPORT(row_kernels);

// Looked up once: a call then costs one load and one indirect call.
std::atomic<const RowKernels*> chosen_kernels{nullptr};

const RowKernels& kernels() {
  const RowKernels* found = chosen_kernels.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = HWY_DYNAMIC_DISPATCH(row_kernels)();
    chosen_kernels.store(found, std::memory_order_release);
  }
  return *found;
}

}  // namespace

void copy_bytes(std::byte* destination, const std::byte* source, std::size_t num_bytes,
                StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null
  const RowKernels& table = kernels();
  (kind == StoreKind::kStreaming ? table.copy_streaming : table.copy_cached)(destination, source,
                                                                             num_bytes);
}

void finish_streaming() { hwy::FlushStream(); }

void scatter_row(const void* x, DType x_dtype, const layout::RowShape& row,
                 std::span<std::byte* const> destinations, StoreKind kind) {
  assert(is_floating(x_dtype) && (is_fp8(row.format) || value_dtype(row.format) == x_dtype));
  const RowKernels& table = kernels();
  const auto* const source = static_cast<const std::byte*>(x);
  const auto num_bytes = static_cast<std::size_t>(row.value_bytes());
  if (is_fp8(row.format)) {
    table.scatter_fp8[static_cast<int>(x_dtype)](source, row, destinations);
  } else if (kind == StoreKind::kStreaming) {
    table.scatter_streaming(source, num_bytes, destinations);
  } else {
    for (std::byte* const out : destinations) table.copy_cached(out, source, num_bytes);
  }
}

void encode_row(const void* x, DType x_dtype, const layout::RowShape& row, std::byte* out) {
  scatter_row(x, x_dtype, row, {&out, 1}, StoreKind::kCached);
}

void combine_row(std::span<const std::byte* const> rows, std::span<const float> weights,
                 DType dtype, int hidden, std::byte* out) {
  assert(is_floating(dtype) && rows.size() == weights.size());
  kernels().combine[static_cast<int>(dtype)](rows, weights.data(), hidden, out);
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names{kernels().name};
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const std::string target_name = hwy::TargetName(target);
    if (target_name != names.front()) names.push_back(target_name);
  }
  return names;
}

bool use_simd_target(std::string_view target_name) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target_name != hwy::TargetName(target)) continue;
    hwy::SetSupportedTargetsForTest(target);
    chosen_kernels.store(HWY_DYNAMIC_DISPATCH(row_kernels)(), std::memory_order_release);
    hwy::SetSupportedTargetsForTest(0);
    return true;
  }
  return false;
}

}  // namespace tandem::cpu
#endif
