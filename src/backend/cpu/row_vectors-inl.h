// Channels of a row in SIMD registers: loads and stores of any alignment that convert between bf16,
// fp16, fp32 and float32 lanes, bit-exact with numeric.h on every target.
//
// The unit is a Pair: two vectors of float32 from one contiguous run of channels. bf16 comes as
// 32-bit words that hold an even and an odd channel, so widening is a shift and a mask and needs
// no shuffle. Roundings are written out in integers, or by adding a power of two whose last place
// is the wanted one: Highway 1.0.3's own float -> bf16 truncates, as does its emulated float ->
// fp16.
//
// Included once per target (Highway's convention for -inl.h files).
#if defined(TANDEM_BACKEND_CPU_ROW_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKEND_CPU_ROW_VECTORS_INL_H_
#undef TANDEM_BACKEND_CPU_ROW_VECTORS_INL_H_
#else
#define TANDEM_BACKEND_CPU_ROW_VECTORS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "tandem/numeric.h"

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

// bf16 in the upper half of each word; the lower half is rubbish. Not for NaN, which the carry may
// turn into anything.
HWY_INLINE Words round_number_to_bf16(Floats values) {
  const Words bits = bits_of(values);
  const Words last = hn::And(hn::ShiftRight<16>(bits), word(1));
  return hn::Add(hn::Add(bits, word(0x7fff)), last);
}

HWY_INLINE Words round_bf16(Floats values) {
  const Words quiet = hn::Or(bits_of(values), word(0x400000));  // NaN stays NaN
  return select(hn::Ne(values, values), quiet, round_number_to_bf16(values));
}

HWY_INLINE Words merge_bf16(Words even, Words odd) {
  return hn::Or(hn::ShiftRight<16>(even), hn::And(odd, word(0xffff0000)));
}

// kIsNumber: no lane is a NaN, which saves a third of the work for bf16.
template <DType kDType, bool kIsNumber>
HWY_INLINE void store_pair(Pair pair, std::byte* destination) {
  if constexpr (kDType == DType::kBFloat16 && kIsNumber) {
    const Words even = round_number_to_bf16(pair.first);
    store(U32(), merge_bf16(even, round_number_to_bf16(pair.second)), destination);
  } else if constexpr (kDType == DType::kBFloat16) {
    store(U32(), merge_bf16(round_bf16(pair.first), round_bf16(pair.second)), destination);
  } else if constexpr (kDType == DType::kFloat16) {
    store_fp16(pair.first, destination);
    store_fp16(pair.second, destination + 2 * kLanes);
  } else {
    store(F32(), pair.first, destination);
    store(F32(), pair.second, destination + 4 * kLanes);
  }
}

// --- One channel, for what is left over ---------------------------------------------------------

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();

#endif
