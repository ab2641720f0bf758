// A source's tokens for one peer on another host, as they land there: a list, then each token's row
// once, whatever the number of its places. docs/wire_format.md draws it.
//
//   | number of rows, first part | token, experts[K], weights[K] of each row | pad | rows |
//
// Weights (float32) are there where the dispatch has them. The peer then answers with a part for
// each row: its weighted sum of what its experts make of it. The first goes to row `first part` of
// the source's landing memory, the others follow.
#pragma once

#include <cstdint>

#include "layout/block.h"

namespace tandem::layout {

// The list is of int32. Rows begin where the longest list would end, so that their place does not
// depend on how many there are.
class Parcel {
 public:
  constexpr Parcel() = default;
  constexpr explicit Parcel(const Capacity& capacity)
      : rows_(
            round_up(list_bytes(capacity.max_tokens, capacity.max_topk, true), kControlAlignment)),
        size_bytes_(
            round_up(rows_ + capacity.max_tokens * capacity.dispatch_pitch, kControlAlignment)) {}

  // Where the entry of a row stands in the list.
  static constexpr std::int64_t entry(std::int64_t row, std::int32_t topk, bool has_weights) {
    return 2 + row * (1 + std::int64_t{topk} * (has_weights ? 2 : 1));
  }
  static constexpr std::int64_t list_bytes(std::int64_t num_rows, std::int32_t topk,
                                           bool has_weights) {
    return entry(num_rows, topk, has_weights) * static_cast<std::int64_t>(sizeof(std::int32_t));
  }

  // From the beginning: the first row. They follow at the pitch of the operation at hand.
  [[nodiscard]] constexpr std::int64_t rows() const { return rows_; }
  [[nodiscard]] constexpr std::int64_t size_bytes() const { return size_bytes_; }

 private:
  std::int64_t rows_ = 0;
  std::int64_t size_bytes_ = 0;
};

}  // namespace tandem::layout
