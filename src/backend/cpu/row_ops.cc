// Combine and copies in SIMD, and the table of all row operations. Compiled once per target by
// Highway's foreach_target and chosen at run time: static dispatch would be scalar code on x86-64's
// baseline.
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
#include <cassert>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend/cpu/row_fp8-inl.h"
#include "backend/cpu/row_vectors-inl.h"
#include "tandem/numeric.h"

#ifndef TANDEM_CPU_ROW_KERNELS
#define TANDEM_CPU_ROW_KERNELS
namespace tandem::cpu {

// What one target offers.
struct RowKernels {
  const char* name;
  void (*copy_streaming)(std::byte* destination, const std::byte* source, std::size_t num_bytes);
  void (*scatter_cached)(const std::byte* source, std::size_t num_bytes,
                         std::span<std::byte* const> destinations);
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

// Asks for a line to be written. Never faults. GCC's builtin asks for reading instead unless it
// compiles for processors that are sure to have the instruction; those without take it for a no-op.
inline void prefetch_for_writing(std::byte* address) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*address));
#else
  __builtin_prefetch(address, 1);
#endif
}

// `rep movsb`: claims lines that other cores hold without reading what is in them. Later stores
// stay behind it. Sanitizers would not see what it reads and writes.
inline void copy_whole(std::byte* destination, const std::byte* source, std::size_t num_bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  asm volatile("rep movsb" : "+D"(destination), "+S"(source), "+c"(num_bytes) : : "memory");
#else
  std::memcpy(destination, source, num_bytes);
#endif
}

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

// --- combine ------------------------------------------------------------------------------------

template <DType kDType>
HWY_INLINE void add_product(Pair& sum, Floats weight, const std::byte* row) {
  const Pair pair = load_pair<kDType>(row);
  sum.first = hn::Add(sum.first, hn::Mul(weight, pair.first));
  sum.second = hn::Add(sum.second, hn::Mul(weight, pair.second));
}

template <DType kDType, bool kIsNumber>
HWY_INLINE void store_four_pairs(Pair a, Pair b, Pair c, Pair d, std::byte* out) {
  constexpr std::size_t kStep = kPair * size_of(kDType);
  store_pair<kDType, kIsNumber>(a, out);
  store_pair<kDType, kIsNumber>(b, out + kStep);
  store_pair<kDType, kIsNumber>(c, out + 2 * kStep);
  store_pair<kDType, kIsNumber>(d, out + 3 * kStep);
}

// False only if no lane is a NaN, nor infinities cancel: a sum of all keeps what is not a number.
HWY_INLINE bool may_hold_nan(Pair a, Pair b, Pair c, Pair d) {
  const Floats ab = hn::Add(hn::Add(a.first, a.second), hn::Add(b.first, b.second));
  const Floats cd = hn::Add(hn::Add(c.first, c.second), hn::Add(d.first, d.second));
  const Floats sum = hn::Add(ab, cd);
  return !hn::AllFalse(F32(), hn::Ne(sum, sum));
}

// Four pairs of channels from byte `offset` on, over all rows, which are read `ahead` bytes in
// advance. Eight sums fit the 16 registers of SSE and AVX2; they have names because an array of
// them would live in memory at -O2.
template <DType kDType>
HWY_INLINE void combine_four_pairs(std::span<const std::byte* const> rows, const float* weights,
                                   std::size_t offset, std::size_t ahead, std::byte* out) {
  constexpr std::size_t kStep = kPair * size_of(kDType);
  const Pair zero = {hn::Zero(F32()), hn::Zero(F32())};
  Pair a = zero;
  Pair b = zero;
  Pair c = zero;
  Pair d = zero;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const Floats weight = hn::Set(F32(), weights[k]);
    const std::byte* const row = rows[k] + offset;
    for (std::size_t line = 0; line < 4 * kStep; line += kLine) hwy::Prefetch(row + ahead + line);
    add_product<kDType>(a, weight, row);
    add_product<kDType>(b, weight, row + kStep);
    add_product<kDType>(c, weight, row + 2 * kStep);
    add_product<kDType>(d, weight, row + 3 * kStep);
  }
  if (kDType == DType::kBFloat16 && !may_hold_nan(a, b, c, d)) {
    store_four_pairs<kDType, true>(a, b, c, d, out + offset);
  } else {
    store_four_pairs<kDType, false>(a, b, c, d, out + offset);
  }
}

template <DType kDType>
HWY_INLINE void combine_pair(std::span<const std::byte* const> rows, const float* weights,
                             std::size_t offset, std::byte* out) {
  Pair sum = {hn::Zero(F32()), hn::Zero(F32())};
  for (std::size_t k = 0; k < rows.size(); ++k) {
    add_product<kDType>(sum, hn::Set(F32(), weights[k]), rows[k] + offset);
  }
  store_pair<kDType, false>(sum, out + offset);
}

template <DType kDType>
void combine(std::span<const std::byte* const> rows, const float* weights, int num_channels,
             std::byte* out) {
  constexpr std::size_t kSize = size_of(kDType);
  // Of 0, 512, 1024 and 2048 bytes the best: 24 us instead of 27 for 8 tokens of K = 8, H = 7168,
  // bf16, in L2 (AVX3).
  constexpr std::size_t kAhead = 512;
  const auto hidden = static_cast<std::size_t>(num_channels);
  std::size_t channel = 0;
  for (; channel + 4 * kPair <= hidden; channel += 4 * kPair) {
    const bool goes_on = channel + 4 * kPair + kAhead / kSize <= hidden;
    combine_four_pairs<kDType>(rows, weights, channel * kSize, goes_on ? kAhead : 0, out);
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

#if HWY_TARGET == HWY_SCALAR
constexpr std::size_t kBlock = kLine;
#else
constexpr std::size_t kBlock = 4 * hn::MaxLanes(Bytes());  // one, two or four lines
#endif

// Writes a block from `source` to each destination, `offset` bytes on: with streaming stores, or
// with ordinary ones after asking for the lines `ahead` bytes further.
template <bool kStreams>
HWY_INLINE void put_block(const std::byte* source, std::span<std::byte* const> destinations,
                          std::size_t offset, [[maybe_unused]] std::size_t ahead) {
#if HWY_TARGET == HWY_SCALAR
  for (std::byte* const out : destinations) std::memcpy(out + offset, source, kBlock);
#else
  constexpr std::size_t kVector = hn::MaxLanes(Bytes());
  const hn::Vec<Bytes> a = load(Bytes(), source);
  const hn::Vec<Bytes> b = load(Bytes(), source + kVector);
  const hn::Vec<Bytes> c = load(Bytes(), source + 2 * kVector);
  const hn::Vec<Bytes> d = load(Bytes(), source + 3 * kVector);
  for (std::byte* const out : destinations) {
    std::byte* const block = out + offset;
    if constexpr (kStreams) {
      auto* const lanes = reinterpret_cast<std::uint8_t*>(block);
      hn::Stream(a, Bytes(), lanes);
      hn::Stream(b, Bytes(), lanes + kVector);
      hn::Stream(c, Bytes(), lanes + 2 * kVector);
      hn::Stream(d, Bytes(), lanes + 3 * kVector);
    } else {
      for (std::size_t i = 0; i < kBlock; i += kLine) prefetch_for_writing(block + ahead + i);
      store(Bytes(), a, block);
      store(Bytes(), b, block + kVector);
      store(Bytes(), c, block + 2 * kVector);
      store(Bytes(), d, block + 3 * kVector);
    }
  }
#endif
}

// Reads each block once and writes it to all destinations. Their owners read these lines last, so
// each has to be claimed from another core first: asking ahead, for many rows at once, hides much
// of that. 4.1 us instead of 5.6 for a token of K = 8, H = 7168, bf16, and 35 instead of 44 for
// eight, between two cores (memcpy row by row; AVX3).
void scatter_cached(const std::byte* source, std::size_t num_bytes,
                    std::span<std::byte* const> destinations) {
  constexpr std::size_t kAhead = 1024;
  std::size_t i = 0;
  for (; i + kBlock <= num_bytes; i += kBlock) {
    const bool goes_on = i + kBlock + kAhead <= num_bytes;
    put_block<false>(source + i, destinations, i, goes_on ? kAhead : 0);
  }
  for (std::byte* const out : destinations) std::memcpy(out + i, source + i, num_bytes - i);
}

void copy_streaming(std::byte* destination, const std::byte* source, std::size_t num_bytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(destination) % kLine;
  const std::size_t head = std::min(num_bytes, (kLine - misaligned) % kLine);
  std::memcpy(destination, source, head);
  std::size_t i = head;
  for (; i + kBlock <= num_bytes; i += kBlock) put_block<true>(source + i, {&destination, 1}, i, 0);
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
  for (; i + kBlock <= num_bytes; i += kBlock) put_block<true>(source + i, destinations, i, 0);
  for (std::byte* const out : destinations) std::memcpy(out + i, source + i, num_bytes - i);
}

const RowKernels kKernels = {
    hwy::TargetName(HWY_TARGET),
    copy_streaming,
    scatter_cached,
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

// us for a dispatch of two ranks, H = 7168, K = 8, T = 1 / 8 / 32, on an EPYC whose two cores share
// an L3: 3.1 / 12.3 / 41 in blocks, 2.3 / 10.8 / 42 whole; whose cores have an L3 each: 12 / 65 /
// 235 and 5.0 / 21 / 77. A Xeon is the faster with blocks: see scatter_cached.
StoreKind cached_stores() {
#if defined(__x86_64__)
  static const bool is_whole = [] {
    constexpr unsigned kErms = 1U << 9;  // `rep movsb` is fast
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __builtin_cpu_is("amd") != 0 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (ebx & kErms) != 0;
  }();
  if (is_whole) return StoreKind::kWhole;
#endif
  return StoreKind::kCached;
}

void copy_bytes(std::byte* destination, const std::byte* source, std::size_t num_bytes,
                StoreKind kind) {
  if (num_bytes == 0) return;  // the pointers may be null
  switch (kind) {
    case StoreKind::kCached:
      std::memcpy(destination, source, num_bytes);
      return;
    case StoreKind::kWhole:
      copy_whole(destination, source, num_bytes);
      return;
    case StoreKind::kStreaming:
      kernels().copy_streaming(destination, source, num_bytes);
      return;
  }
}

void scatter_bytes(const std::byte* source, std::size_t num_bytes,
                   std::span<std::byte* const> destinations, StoreKind kind) {
  switch (kind) {
    case StoreKind::kCached:
      kernels().scatter_cached(source, num_bytes, destinations);
      return;
    case StoreKind::kWhole:
      for (std::byte* const out : destinations) copy_whole(out, source, num_bytes);
      return;
    case StoreKind::kStreaming:
      kernels().scatter_streaming(source, num_bytes, destinations);
      return;
  }
}

void finish_streaming() { hwy::FlushStream(); }

void scatter_row(const void* x, DType x_dtype, const layout::RowShape& row,
                 std::span<std::byte* const> destinations, StoreKind kind) {
  assert(is_floating(x_dtype) && (is_fp8(row.format) || value_dtype(row.format) == x_dtype));
  const RowKernels& table = kernels();
  const auto* const source = static_cast<const std::byte*>(x);
  const auto num_bytes = static_cast<std::size_t>(row.value_bytes());
  if (is_fp8(row.format) && kind != StoreKind::kWhole) {
    table.scatter_fp8[static_cast<int>(x_dtype)](source, row, destinations);
  } else if (is_fp8(row.format)) {
    alignas(kLine) std::byte encoded[layout::max_dispatch_pitch(kMaxHidden, Format::kFp8)];
    std::byte* const once = encoded;
    table.scatter_fp8[static_cast<int>(x_dtype)](source, row, {&once, 1});
    for (std::byte* const out : destinations) {
      copy_whole(out, encoded, num_bytes);
      std::memcpy(out + row.scales_offset(), encoded + row.scales_offset(),
                  sizeof(float) * static_cast<std::size_t>(row.num_scales()));
    }
  } else {
    scatter_bytes(source, num_bytes, destinations, kind);
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
