// Who takes part in an operation on GPUs, as hosts work it out from a view: the roster words that
// kernels go by (layout/control_word.h), and to whom on other hosts a rank's words and rows go.
#pragma once

#include <vector>

#include "layout/control_word.h"
#include "runtime/membership.h"

namespace tandem::cuda {

// A rank's roster word, for whoever has not heard of the last change yet.
inline layout::Word pending_word(const runtime::View& view, int rank) {
  return layout::make_word(view.from[rank], layout::kRosterPending |
                                                (view.active[rank] ? 0 : layout::kRosterMasked) |
                                                (view.lost[rank] ? layout::kRosterLost : 0));
}

// The same for whoever begins with operation `first`: of changes that are not near it epochs tell
// nothing any more.
inline layout::Word word_from(const runtime::View& view, int rank, layout::Epoch first) {
  constexpr layout::Epoch kNear = 64;
  const layout::Word word = pending_word(view, rank);
  return view.from[rank] - first + kNear < 2 * kNear ? word : layout::settled(word);
}

// Asked about one operation after the other, as epochs may wrap between a change and now.
//
// Thread safety: one caller at a time.
class Audience {
 public:
  explicit Audience(int num_ranks) : known_(num_ranks) {}

  // By `view`, the newest one: there is none yet by which operations after this one will go. A rank
  // that is lost is told nothing any more: what kernels have left out for it would be taken for
  // rows.
  [[nodiscard]] bool takes_part(const runtime::View& view, int rank, layout::Epoch epoch) {
    if (view.lost[rank] && !view.active[rank]) return false;
    Known& known = known_[rank];
    if (known.from != view.from[rank] || known.active != view.active[rank]) {
      known = {.from = view.from[rank], .active = view.active[rank]};
    }
    known.holds = known.holds || layout::has_reached(epoch, known.from);
    return known.holds == known.active;
  }

 private:
  // The last change of a rank. Until it holds, the opposite does.
  struct Known {
    layout::Epoch from = 0;
    bool active = false;
    bool holds = false;
  };
  std::vector<Known> known_;  // by rank
};

}  // namespace tandem::cuda
