// From the matrix of all counts to the rows: where each expert's rows begin on its owner, where
// this rank's rows go, what this rank receives, and whether everything fits. Every rank computes
// the same verdict from the same matrix.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/expert_map.h"
#include "layout/row.h"
#include "tandem/types.h"

namespace tandem::core {

// The arguments of a dispatch that decide where rows go.
struct ReceiveShape {
  Placement placement = Placement::kPacked;
  Layout layout = Layout::kPadded;
  std::int32_t max_tokens = 1;  // M of the call
  std::int32_t topk = 1;
  std::int32_t row_alignment = 1;
  std::int64_t capacity_rows = 0;
};

// counts[r * E + e]: rows that rank r sends to expert e.
using CountMatrix = std::span<const std::int32_t>;

// What this rank receives; spans of the sizes given, written by plan_rows.
struct ReceivedRows {
  std::span<std::int32_t> counts;   // [L]
  std::span<std::int64_t> offsets;  // [L + 1]
  std::span<std::int64_t> ranges;   // [L, R]
};

// Why a dispatch does not fit: `rows` exceed `limit` on `rank`, in all, for one expert, or
// (slotted) from one source.
struct Excess {
  int rank = 0;
  int expert = -1;
  int source = -1;
  std::int64_t rows = 0;
  std::int64_t limit = 0;
};

// Fills begin[e] = the row, on e's owner, of `rank`'s slot 0 for expert e, and `received` for
// `rank`. Returns the first excess in order of ranks; then the outputs are undefined.
[[nodiscard]] std::optional<Excess> plan_rows(CountMatrix counts, const ExpertMap& experts,
                                              const ReceiveShape& shape, int rank,
                                              std::span<std::int64_t> begin,
                                              const ReceivedRows& received);

// Slotted: rows that one source may have for a rank that owns `num_local` experts.
TANDEM_HOST_DEVICE constexpr std::int64_t rows_per_source(std::int32_t max_tokens,
                                                          std::int32_t topk,
                                                          std::int32_t num_local) {
  return std::int64_t{max_tokens} * (topk < num_local ? topk : num_local);
}

// Slotted: the place of `source`'s first row for each expert within its owner's landing region,
// from that source's counts alone: by expert, then slot. Returns the first excess.
[[nodiscard]] std::optional<Excess> plan_landing(std::span<const std::int32_t> source_counts,
                                                 const ExpertMap& experts,
                                                 const ReceiveShape& shape, int source,
                                                 std::span<std::int64_t> begin);

// One range word: count in the low 32 bits, begin in the high.
constexpr std::int64_t make_range(std::int64_t begin, std::int64_t count) {
  return (begin << 32) | count;
}

}  // namespace tandem::core
