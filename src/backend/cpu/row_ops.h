// The arithmetic and the copies of the CPU backend, one row at a time, in SIMD chosen at run time
// (Highway). Bit-exact with numeric.h (any NaN equals any NaN) on every target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout/row.h"
#include "tandem/types.h"

namespace tandem::cpu {

// How bytes are written. Any alignment and size; fastest at 64-byte multiples.
enum class StoreKind : std::uint8_t {
  kCached,     // ordinary stores
  kWhole,      // the processor's own copy, one destination after the other
  kStreaming,  // past the cache: pays once what is written outgrows it, hurts when the reader comes
               // soon; needs finish_streaming() before anything is published
};

// kCached or kWhole, whichever this processor is faster with.
[[nodiscard]] StoreKind cached_stores();

void copy_bytes(std::byte* destination, const std::byte* source, std::size_t num_bytes,
                StoreKind kind);

// copy_bytes to each of `destinations`, reading the source once.
void scatter_bytes(const std::byte* source, std::size_t num_bytes,
                   std::span<std::byte* const> destinations, StoreKind kind);

// Orders streaming stores of this thread before later stores.
void finish_streaming();

// Writes the wire form of one row of `row.hidden` values of `x_dtype` to `out`: the values and, for
// fp8, the scales at row.scales_offset(), the padding of the scales' last word zero. x need not be
// aligned beyond its dtype; `out` is 16-byte aligned and has row.pitch() bytes.
void encode_row(const void* x, DType x_dtype, const layout::RowShape& row, std::byte* out);

// encode_row to each of `destinations`, reading x and computing once: how a token reaches its K
// rows. fp8 rows know no kStreaming: they are written as with kCached.
void scatter_row(const void* x, DType x_dtype, const layout::RowShape& row,
                 std::span<std::byte* const> destinations, StoreKind kind);

// out[h] = cast(sum over k of weights[k] * rows[k][h]), products and sums in float32, each rounded,
// from +0 in the order of k; no rows give zeros. `dtype` is that of rows and out: bf16, fp16 or
// fp32. rows are 16-byte aligned, out is aligned to its dtype only.
void combine_row(std::span<const std::byte* const> rows, std::span<const float> weights,
                 DType dtype, int hidden, std::byte* out);

// Names of the SIMD targets that were compiled in and that this CPU has, the one in use first.
std::vector<std::string> simd_targets();

// Takes another of simd_targets() into use, for tests and comparisons; not while other threads are
// at work. False, and no change, for a name that is not among them.
bool use_simd_target(std::string_view target_name);

}  // namespace tandem::cpu
