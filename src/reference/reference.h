// The oracle: dispatch and combine over plain arrays of all ranks at once, slow and obvious. Every
// test of every backend is judged by it. It shares no code with the backends beyond numeric.h and
// the row layout's constants, and is written to be checked by eye.
#pragma once

#include <cstdint>
#include <vector>

#include "tandem/types.h"

namespace tandem::reference {

// What one rank brings to a dispatch. Values are the exact bits of x's dtype, row-major [T, H].
struct RankInput {
  int num_tokens = 0;
  std::vector<std::byte> x;            // num_tokens * hidden * size_of(dtype)
  std::vector<std::int64_t> topk_idx;  // [T, K], negative: none
  std::vector<float> topk_weights;     // [T, K]
};

struct Problem {
  int num_ranks = 1;
  int num_experts = 1;
  int hidden = 1;
  int topk = 1;
  int max_tokens = 1;                   // M of the call
  std::vector<int> expert_owners = {};  // [E]; empty: contiguous, as even as possible
  DType x_dtype = DType::kBFloat16;
  Format format = Format::kBFloat16;
  Layout layout = Layout::kPadded;
  int row_alignment = 1;
  bool partial_sums = false;          // of a combine: by rank
  std::vector<RankInput> ranks = {};  // [R]
};

// What one rank must receive. Rows are numbered as in DispatchResult::x taken as [rows, H]; rows
// that hold no token have source_tokens -1 and zero bytes here, and are not compared.
struct RankOutput {
  std::vector<int> experts;                 // ids of the local experts, by local number
  std::vector<std::int32_t> counts;         // [L]
  std::vector<std::int64_t> offsets;        // [L + 1]
  std::vector<std::int64_t> ranges;         // [L, R]
  std::int64_t num_rows = 0;                // rows of x: L * R * M, or offsets[L]
  std::vector<std::int32_t> source_ranks;   // [num_rows], -1: none
  std::vector<std::int32_t> source_tokens;  // [num_rows], -1: none
  std::vector<std::byte> values;            // [num_rows, H] of the format's value dtype
  std::vector<std::byte> scales;            // [num_rows, num_scales] float32 or int32; fp8 only
};

std::vector<RankOutput> dispatch(const Problem& problem);

// Rows of `format` back to float32: what an expert that dequantises would read. [num_rows, H].
std::vector<float> dequantise(const RankOutput& output, int hidden, Format format);

// y[r] are rank r's expert outputs, [num_rows, H] of `dtype` in the shape of dispatch's output.
// Returns out[r], [T, H] of `dtype`: float32 products and sums, each rounded, in the order of k.
// With partial_sums: of each rank's experts such a sum, rounded to `dtype`; then the sum of these,
// in the order of each rank's first k.
std::vector<std::vector<std::byte>> combine(const Problem& problem,
                                            const std::vector<std::vector<std::byte>>& y,
                                            DType dtype);

// Would this dispatch be refused with kCapacity by buffers of this many rows?
// Packed: some rank's rows (with alignment) exceed capacity_rows, or in the padded layout some
// expert receives more than R * M. Slotted: the same, or some source has more than M * min(K, L)
// rows for one rank.
bool exceeds_capacity(const Problem& problem, Placement placement, std::int64_t capacity_rows);

}  // namespace tandem::reference
