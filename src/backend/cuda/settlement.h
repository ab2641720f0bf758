// What a lost rank had announced, where those who go on share no memory: each tells what its own
// block holds (holdings), all of them together say what all are to have (a settlement), and each
// makes its block so (announcement.h has the rules). Plain words, since they travel.
//
// Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "backend/cuda/announcement.h"

namespace tandem::cuda {

// Of one lost rank: an announcement by parity.
struct Holding {
  std::vector<layout::Word> words[2];
};

// The first operation that it has announced to nobody, and by parity the dispatch that all are to
// have; empty: nobody has a newer one than all, or it is a combine.
struct Settlement {
  layout::Epoch end = 0;
  std::vector<layout::Word> dispatch[2];
};

// `holders`: those who go on. `near`: as for newest_announced.
inline Settlement settle(std::vector<Holding> holders, layout::Epoch near) {
  Settlement settlement;
  settlement.end = near - 1;  // with the one before it was done long ago
  for (int parity = 0; parity < 2; ++parity) {
    std::vector<Announcement> announcements;
    for (Holding& holder : holders) announcements.emplace_back(holder.words[parity]);
    const std::optional<layout::Epoch> newest = newest_announced(announcements, near);
    if (newest && layout::has_reached(*newest + 1, settlement.end)) settlement.end = *newest + 1;
    const std::optional<layout::Epoch> begun = newest_begun(announcements, near);
    static_cast<void>(agree_on_announcement(announcements, near));
    const auto has_it = [&](const Announcement& words) {
      const auto header = layout::decode_header(layout::value_of(words.back()));
      return begun && layout::epoch_of(words.back()) == *begun &&
             header.operation == Operation::kDispatch;
    };
    const auto found = std::ranges::find_if(announcements, has_it);
    if (found != announcements.end()) settlement.dispatch[parity] = {found->begin(), found->end()};
  }
  return settlement;
}

// As words, for announcements of `num_words`.
inline std::size_t settlement_words(std::size_t num_words) { return 1 + 2 * (1 + num_words); }
inline std::vector<layout::Word> encode(const Settlement& settlement, std::size_t num_words) {
  std::vector<layout::Word> result{settlement.end};
  for (const auto& dispatch : settlement.dispatch) {
    result.push_back(dispatch.empty() ? 0 : 1);
    result.insert(result.end(), dispatch.begin(), dispatch.end());
    result.resize(result.size() + num_words - dispatch.size());
  }
  return result;
}
inline std::optional<Settlement> decode_settlement(std::span<const layout::Word> words,
                                                   std::size_t num_words) {
  if (words.size() != settlement_words(num_words)) return {};
  Settlement settlement;
  settlement.end = static_cast<layout::Epoch>(words.front());
  words = words.subspan(1);
  for (auto& dispatch : settlement.dispatch) {
    if (words.front() != 0) dispatch = {words.begin() + 1, words.begin() + 1 + num_words};
    words = words.subspan(1 + num_words);
  }
  return settlement;
}

// Settlements of several lost ranks, one behind the other. `told`: by each of those who go on,
// their announcements by rank and parity; nothing if that is not what it is. `near`: of each.
inline std::optional<std::vector<layout::Word>> settle_all(
    std::span<const std::vector<layout::Word>> told, std::span<const layout::Epoch> near,
    std::size_t num_words) {
  std::vector<layout::Word> settled;
  for (std::size_t i = 0; i < near.size(); ++i) {
    std::vector<Holding> holders;
    for (const std::vector<layout::Word>& words : told) {
      if (words.size() != near.size() * 2 * num_words) return {};
      Holding& holder = holders.emplace_back();
      for (std::size_t parity = 0; parity < 2; ++parity) {
        const auto part = std::span(words).subspan((2 * i + parity) * num_words, num_words);
        holder.words[parity] = {part.begin(), part.end()};
      }
    }
    const auto words = encode(settle(std::move(holders), near[i]), num_words);
    settled.insert(settled.end(), words.begin(), words.end());
  }
  return settled;
}

// Makes this block's announcement of `parity` what the settlement says. Has it changed?
inline bool apply(const Settlement& settlement, int parity, Announcement own, layout::Epoch near) {
  const std::vector<layout::Word>& dispatch = settlement.dispatch[parity];
  if (dispatch.empty()) return agree_on_announcement(std::span(&own, 1), near).front();
  if (std::ranges::equal(own, dispatch)) return false;
  // Of the number of blocks this rank may know another, where it has it whole.
  if (layout::epoch_of(own.back()) == layout::epoch_of(dispatch.back()) &&
      !agree_on_announcement(std::span(&own, 1), near).front()) {
    return false;
  }
  std::ranges::copy(dispatch, own.begin());
  return true;
}

}  // namespace tandem::cuda
