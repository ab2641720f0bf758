// What a rank that has been lost had announced of an operation, as it lies in the blocks of those
// who go on: each may lack other words of it. Either all of them are to count it in, or none.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backend/cuda/kernel_params.h"
#include "layout/block.h"

namespace tandem::cuda {

// The words of one source and parity in one block, in this order: counts, number of blocks,
// arguments, header.
struct AnnouncementPiece {
  std::int64_t offset;  // in a block
  std::int64_t num_words;
};
inline std::array<AnnouncementPiece, 4> announcement_pieces(const layout::Block& block, int parity,
                                                            int source) {
  return {{{block.count(parity, source, 0), block.capacity().num_experts},
           {block.arrived(parity, source, kNumBlocksWord), 1},
           {block.argument(parity, source, layout::Argument{0}), layout::kNumArguments},
           {block.header(parity, source), 1}}};
}
inline std::int64_t announcement_words(const layout::Block& block) {
  return block.capacity().num_experts + 1 + layout::kNumArguments + 1;
}

using Announcement = std::span<layout::Word>;

// Counts may be of operations of long ago: epochs are compared with `near`, which is at most two
// operations from any that the lost rank can have announced last.
inline bool is_recent(layout::Word word, layout::Epoch near) {
  constexpr layout::Epoch kMost = 4;
  return layout::epoch_of(word) - near + kMost <= 2 * kMost;
}

// The newest operation that a header among these is of, if it is recent.
inline std::optional<layout::Epoch> newest_announced(std::span<const Announcement> holders,
                                                     layout::Epoch near) {
  std::optional<layout::Epoch> newest;
  for (const Announcement& holder : holders) {
    const layout::Word header = holder.back();
    if (!is_recent(header, near)) continue;
    if (!newest || layout::has_reached(layout::epoch_of(header), *newest)) {
      newest = layout::epoch_of(header);
    }
  }
  return newest;
}

// The same of any word.
inline std::optional<layout::Epoch> newest_begun(std::span<const Announcement> holders,
                                                 layout::Epoch near) {
  std::optional<layout::Epoch> newest;
  for (const Announcement& holder : holders) {
    for (const layout::Word word : holder) {
      const layout::Epoch epoch = layout::epoch_of(word);
      if (!is_recent(word, near) || (newest && !layout::has_reached(epoch, *newest))) continue;
      newest = epoch;
    }
  }
  return newest;
}

// Makes all holders lack or have the newest operation alike; says which of them it has changed. Of
// a dispatch all get what one of them has whole: it may have finished by that. A combine needs no
// agreement, but that nobody has a part of it. May be repeated, and done by several at once: what
// is whole stays, and what is not never becomes so otherwise.
inline std::vector<bool> agree_on_announcement(std::span<const Announcement> holders,
                                               layout::Epoch near) {
  std::vector<bool> changed(holders.size());
  const std::optional<layout::Epoch> newest = newest_begun(holders, near);
  if (!newest) return changed;
  const auto is_of_it = [&](layout::Word word) { return layout::epoch_of(word) == *newest; };
  const auto is_whole = [&](const Announcement& holder) {
    if (!is_of_it(holder.back())) return false;
    const auto header = layout::decode_header(layout::value_of(holder.back()));
    const Announcement words =
        header.operation == Operation::kDispatch ? holder : holder.last(layout::kNumArguments + 1);
    return std::all_of(words.begin(), words.end(), is_of_it);
  };
  const auto whole = std::find_if(holders.begin(), holders.end(), is_whole);
  const bool copies =
      whole != holders.end() &&
      layout::decode_header(layout::value_of(whole->back())).operation == Operation::kDispatch;
  for (std::size_t i = 0; i < holders.size(); ++i) {
    if (is_whole(holders[i])) continue;
    changed[i] = true;
    if (copies) {
      std::copy(whole->begin(), whole->end(), holders[i].begin());
    } else {
      // As if the last one of this parity were the one before.
      std::replace_if(holders[i].begin(), holders[i].end(), is_of_it,
                      layout::make_word(*newest - 2, 0));
    }
  }
  return changed;
}

}  // namespace tandem::cuda
