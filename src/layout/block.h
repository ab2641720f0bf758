// Where everything lies in a rank's block of symmetric memory. All ranks use the same offsets,
// which depend only on capacities fixed when the buffer is made. docs/wire_format.md draws it.
//
//   | control | half 0: view, combine | half 1: view, combine | landing 0 | landing 1 |
//
// A region of rows is an array of int32 source tokens (view and landing only), then the rows.
#pragma once

#include <cstdint>

#include "layout/control_word.h"
#include "layout/row.h"
#include "tandem/types.h"

namespace tandem::layout {

// Regions start on a page, so that each can be protected, advised or registered by itself.
inline constexpr std::int64_t kRegionAlignment = 4096;
// Control words of different kinds never share a cache line (128: the pair that prefetchers fetch).
inline constexpr std::int64_t kControlAlignment = 128;
inline constexpr int kNumHalves = 2;

struct Capacity {
  std::int32_t num_ranks = 1;
  std::int32_t num_experts = 1;
  std::int32_t max_local_experts = 1;  // the most that any rank owns
  std::int32_t max_tokens = 1;
  std::int32_t max_topk = 1;
  std::int32_t num_arrival_words = 1;  // words that one source signals its rows' arrival with
  std::int64_t dispatch_pitch = 16;    // widest row of a dispatch
  std::int64_t combine_pitch = 16;     // widest row of a combine
  std::int64_t rows = 1;               // that a dispatch's result may take on one rank
  std::int64_t view_rows = 0;          // 0: no packed dispatch
  std::int64_t landing_rows = 0;       // 0: no slotted dispatch
  std::int64_t combine_rows = 0;       // 0: no combine
};

// What two ranks that sleep and wake share (CPU backend): a futex word counted up by every
// publisher, and a flag that says whether anybody sleeps on it.
struct Doorbell {
  std::uint32_t rings;
  std::uint32_t sleepers;
};

class Block {
 public:
  constexpr Block() = default;
  TANDEM_HOST_DEVICE constexpr explicit Block(const Capacity& capacity) : capacity_(capacity) {
    const std::int64_t ranks = capacity.num_ranks;
    std::int64_t cursor = 0;
    const auto reserve = [&cursor](std::int64_t bytes, std::int64_t alignment) {
      const std::int64_t offset = round_up(cursor, alignment);
      cursor = offset + bytes;
      return offset;
    };
    constexpr std::int64_t kWord = sizeof(Word);
    headers_ = reserve(2 * ranks * kWord, kControlAlignment);
    arguments_ = reserve(2 * ranks * kNumArguments * kWord, kControlAlignment);
    arrived_ = reserve(2 * ranks * capacity.num_arrival_words * kWord, kControlAlignment);
    completed_ = reserve(ranks * kWord, kControlAlignment);
    counts_ = reserve(2 * ranks * capacity.num_experts * kWord, kControlAlignment);
    doorbell_ = reserve(sizeof(Doorbell), kControlAlignment);
    roster_ = reserve((ranks + 1) * kWord, kControlAlignment);
    at_work_ = reserve(kWord, kControlAlignment);
    control_bytes_ = round_up(cursor, kControlAlignment);

    for (int half = 0; half < kNumHalves; ++half) {
      view_[half] = reserve(region_bytes(capacity.view_rows, capacity.dispatch_pitch, true),
                            kRegionAlignment);
      combine_[half] = reserve(region_bytes(capacity.combine_rows, capacity.combine_pitch, false),
                               kRegionAlignment);
    }
    for (int half = 0; half < kNumHalves; ++half) {
      landing_[half] = reserve(region_bytes(capacity.landing_rows, capacity.dispatch_pitch, true),
                               kRegionAlignment);
    }
    size_bytes_ = round_up(cursor, kRegionAlignment);
  }

  TANDEM_HOST_DEVICE constexpr const Capacity& capacity() const { return capacity_; }
  TANDEM_HOST_DEVICE constexpr std::int64_t size_bytes() const { return size_bytes_; }
  TANDEM_HOST_DEVICE constexpr std::int64_t control_bytes() const { return control_bytes_; }

  // Control words, by parity of the epoch and the rank that writes them.
  TANDEM_HOST_DEVICE constexpr std::int64_t header(int parity, int source) const {
    return headers_ + word(parity * capacity_.num_ranks + source);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t argument(int parity, int source, Argument which) const {
    return arguments_ + word((std::int64_t{parity} * capacity_.num_ranks + source) * kNumArguments +
                             static_cast<int>(which));
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t arrived(int parity, int source, int index) const {
    return arrived_ + word((std::int64_t{parity} * capacity_.num_ranks + source) *
                               capacity_.num_arrival_words +
                           index);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t completed(int source) const {
    return completed_ + word(source);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t count(int parity, int source, int expert) const {
    return counts_ +
           word((std::int64_t{parity} * capacity_.num_ranks + source) * capacity_.num_experts +
                expert);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t doorbell() const { return doorbell_; }

  // GPU: who takes part (RosterWord), and since which view operations are to stop.
  TANDEM_HOST_DEVICE constexpr std::int64_t roster(int rank) const { return roster_ + word(rank); }
  TANDEM_HOST_DEVICE constexpr std::int64_t stop() const { return roster(capacity_.num_ranks); }
  // GPU: blocks of this rank's kernels that are at work, and whether they are to be the last.
  TANDEM_HOST_DEVICE constexpr std::int64_t at_work() const { return at_work_; }

  // Source tokens of a view or landing region's rows.
  TANDEM_HOST_DEVICE constexpr std::int64_t view_sources(int half) const { return view_[half]; }
  TANDEM_HOST_DEVICE constexpr std::int64_t landing_sources(int half) const {
    return landing_[half];
  }

  // First row of a region. Rows follow at the pitch of the operation at hand.
  TANDEM_HOST_DEVICE constexpr std::int64_t view_rows(int half) const {
    return view_[half] + sources_bytes(capacity_.view_rows);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t landing_rows(int half) const {
    return landing_[half] + sources_bytes(capacity_.landing_rows);
  }
  TANDEM_HOST_DEVICE constexpr std::int64_t combine_rows(int half) const { return combine_[half]; }

 private:
  TANDEM_HOST_DEVICE static constexpr std::int64_t word(std::int64_t index) {
    return index * static_cast<std::int64_t>(sizeof(Word));
  }
  TANDEM_HOST_DEVICE static constexpr std::int64_t sources_bytes(std::int64_t rows) {
    return round_up(rows * static_cast<std::int64_t>(sizeof(std::int32_t)), kControlAlignment);
  }
  TANDEM_HOST_DEVICE static constexpr std::int64_t region_bytes(std::int64_t rows,
                                                                std::int64_t pitch,
                                                                bool has_sources) {
    return rows == 0 ? 0 : (has_sources ? sources_bytes(rows) : 0) + rows * pitch;
  }

  Capacity capacity_;
  std::int64_t headers_ = 0;
  std::int64_t arguments_ = 0;
  std::int64_t arrived_ = 0;
  std::int64_t completed_ = 0;
  std::int64_t counts_ = 0;
  std::int64_t doorbell_ = 0;
  std::int64_t roster_ = 0;
  std::int64_t at_work_ = 0;
  std::int64_t control_bytes_ = 0;
  std::int64_t view_[kNumHalves] = {};
  std::int64_t combine_[kNumHalves] = {};
  std::int64_t landing_[kNumHalves] = {};
  std::int64_t size_bytes_ = 0;
};

}  // namespace tandem::layout
