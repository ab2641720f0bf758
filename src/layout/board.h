// The membership board: a small piece of memory that all ranks of a buffer share beside their
// blocks, and that outlives any of them. It says who takes part, and since when.
// runtime/membership.h works on it, docs/failures.md explains it.
//
//   decision | cell of rank 0 | cell of rank 1 | ..
//   decision := generation of the newest view:32 rank that proposed it:32
//   cell     := status words, then proposals: that of generation g in slot g % kNumViews
//   proposal := generation:32 round:32, number:32 proposer of the generation before:32, active
//   ranks, lost ranks
//               (a bit each), first epochs (32 bits each), bytes of the cause, cause
//
// Every word is one aligned 64-bit store. A rank writes its own cell only; the decision is changed
// by compare-and-swap only.
#pragma once

#include <cstdint>

#include "layout/block.h"
#include "layout/control_word.h"

namespace tandem::layout {

// What a rank tells about itself, a word each.
enum class Status : int {
  kAcked,         // number of the newest view that it has adopted
  kFinishedEven,  // the last dispatch of even epoch that it finished: epoch:32, generation of its
  kFinishedOdd,   //   plan:32; and of odd epoch
  kAt,            // its last operation and whom it waits for: epoch:32, rank + 1 or 0:32
  kWriting,       // 1 while it may be writing rows into peers' memory
  kRecovering,    // the recovery that it waits in: round:32, its next epoch:32
  kKnocks,        // not 0 while it is masked and waits to be let in: 1:32, its next epoch:32
  kLeft,          // 1 once it has destroyed its buffer
  kIncarnation,   // how many processes have been this rank
  kProcess,       // runtime::ProcessIdentity: pid,
  kStartTime,     //   start time,
  kNamespace,     //   pid namespace
  kMet,           // GPU: whose block it has mapped of those that wait: incarnation:32, rank + 1:32
  kSettled,       // GPU, across hosts: number of the last settlement that its kernels go by
  kCount
};

inline constexpr int kNumStatusWords = static_cast<int>(Status::kCount);
// A view stays readable until this many later ones have been decided: more than can be within one
// operation, during which a rank may need to look back.
inline constexpr std::uint32_t kNumViews = 8;
inline constexpr std::int64_t kCauseBytes = 1024;

constexpr Status finished(Epoch epoch) {
  return parity(epoch) == 0 ? Status::kFinishedEven : Status::kFinishedOdd;
}

class Board {
 public:
  constexpr Board() = default;
  constexpr explicit Board(int num_ranks)
      : num_ranks_(num_ranks),
        view_words_(3 + 2 * active_words() + from_words() + kCauseBytes / kWord),
        cell_bytes_(round_up((kStatusSpace + kNumViews * view_words_) * kWord, kControlAlignment)) {
  }

  [[nodiscard]] constexpr std::int64_t size_bytes() const {
    return round_up(kControlAlignment + num_ranks_ * cell_bytes_, kRegionAlignment);
  }

  [[nodiscard]] constexpr std::int64_t decision() const { return 0; }
  [[nodiscard]] constexpr std::int64_t status(int rank, Status which) const {
    return cell(rank) + static_cast<int>(which) * kWord;
  }

  // Words of a proposal.
  [[nodiscard]] constexpr std::int64_t view(int proposer, std::uint32_t generation) const {
    return cell(proposer) + (kStatusSpace + generation % kNumViews * view_words_) * kWord;
  }
  [[nodiscard]] constexpr std::int64_t view_words() const { return view_words_; }
  [[nodiscard]] constexpr std::int64_t active_words() const { return (num_ranks_ + 63) / 64; }
  [[nodiscard]] constexpr std::int64_t from_words() const { return (num_ranks_ + 1) / 2; }

 private:
  static constexpr std::int64_t kWord = sizeof(Word);
  static constexpr std::int64_t kStatusSpace = 16;  // words: a cache line of its own
  static_assert(kNumStatusWords <= kStatusSpace && kStatusSpace * kWord == kControlAlignment);

  [[nodiscard]] constexpr std::int64_t cell(int rank) const {
    return kControlAlignment + rank * cell_bytes_;
  }

  std::int64_t num_ranks_ = 0;
  std::int64_t view_words_ = 0;
  std::int64_t cell_bytes_ = 0;
};

}  // namespace tandem::layout
