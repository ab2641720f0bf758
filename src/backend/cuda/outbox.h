// What a rank's kernels write for peers on other hosts: memory of the host that they write in place
// of these peers' blocks, the same for all of them. Control words lie where they would in a block;
// rows and source tokens are packed by owner, expert and slot, as they go over the wire. One class
// for host and device, as layout/block.h.
//
//   | control words | ring | first rows, halves | handle arrays of halves 0, 1 | sources, rows 0 |
//   1 |
#pragma once

#include <cstdint>

#include "backend/cuda/request_ring.h"
#include "layout/block.h"

namespace tandem::cuda {

class Outbox {
 public:
  constexpr Outbox() = default;
  explicit constexpr Outbox(const layout::Block& block) {
    const layout::Capacity& capacity = block.capacity();
    std::int64_t cursor = block.control_bytes();
    const auto reserve = [&cursor](std::int64_t bytes) {
      const std::int64_t offset = layout::round_up(cursor, layout::kControlAlignment);
      cursor = offset + bytes;
      return offset;
    };
    ring_ = reserve(sizeof(RequestRing));
    const std::int64_t num_local = capacity.max_local_experts;
    const std::int64_t rows = most_rows(capacity);
    for (int i = 0; i < 2; ++i) {
      first_rows_[i] = reserve(capacity.num_experts * std::int64_t{4});
      halves_[i] = reserve(capacity.num_ranks * std::int64_t{4});
      offsets_[i] = reserve((num_local + 1) * 8);
      ranges_[i] = reserve(num_local * capacity.num_ranks * 8);
      sources_[i] = reserve(rows * 4);
      rows_[i] = reserve(rows * capacity.dispatch_pitch);
    }
    size_bytes_ = layout::round_up(cursor, layout::kRegionAlignment);
  }

  // Rows that a rank sends, and gets back, in one operation.
  static constexpr std::int64_t most_rows(const layout::Capacity& capacity) {
    return std::int64_t{capacity.max_tokens} * capacity.max_topk;
  }

  TANDEM_HOST_DEVICE constexpr std::int64_t ring() const { return ring_; }
  // By parity of the dispatch's epoch. uint32 [E]: the row, in its owner's block, of this rank's
  // slot 0 for an expert; uint32 [R]: the half of the owner's view.
  TANDEM_HOST_DEVICE constexpr std::int64_t first_rows(int parity) const {
    return first_rows_[parity];
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t halves(int parity) const { return halves_[parity]; }
  // int32 [M * K], byte [M * K][pitch].
  TANDEM_HOST_DEVICE constexpr std::int64_t sources(int parity) const { return sources_[parity]; }
  TANDEM_HOST_DEVICE constexpr std::int64_t rows(int parity) const { return rows_[parity]; }
  // By half: int64 [L + 1], [L, R], as in the handle.
  TANDEM_HOST_DEVICE constexpr std::int64_t offsets(int half) const { return offsets_[half]; }
  TANDEM_HOST_DEVICE constexpr std::int64_t ranges(int half) const { return ranges_[half]; }
  constexpr std::int64_t size_bytes() const { return size_bytes_; }

 private:
  std::int64_t ring_ = 0;
  std::int64_t first_rows_[2] = {};
  std::int64_t halves_[2] = {};
  std::int64_t offsets_[2] = {};
  std::int64_t ranges_[2] = {};
  std::int64_t sources_[2] = {};
  std::int64_t rows_[2] = {};
  std::int64_t size_bytes_ = 0;
};

}  // namespace tandem::cuda
