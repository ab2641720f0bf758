// The host's bookkeeping of one rank's operations on one buffer: which half the next dispatch
// takes, which handles are still valid, which halves are reserved for a zero-copy combine, which
// hooks are held back. Pure; knows no memory and no peers. Refuses what would wait for itself
// (kOrder).
//
// A half belongs to a dispatch: its view, its handle's arrays and the combine region of its
// combine. Halves alternate, but a half that is reserved, or whose last operation's hook has not
// run, is skipped.
//
// Each operation is asked for first (choose_half, require_combine: const, may throw) and recorded
// once the backend has accepted it, so that a refused operation leaves no trace.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>

#include "layout/block.h"

namespace tandem::runtime {

// Identity of a dispatch as its handle knows it.
struct DispatchId {
  std::uint64_t id = 0;  // 0: none
  int half = 0;
};

class Sequence {
 public:
  // The half that the next dispatch takes. kOrder if two hooks are held back, if one is and
  // `has_hook` is false, or if neither half is free.
  [[nodiscard]] int choose_half(bool has_hook) const;

  // Id of the next dispatch.
  [[nodiscard]] std::uint64_t next_id() const { return next_id_; }

  // Records a dispatch into `half`; any earlier handle of that half becomes stale. Returns the
  // number of the operation, which its hook says again.
  std::uint64_t record_dispatch(int half, bool has_hook);

  // kStaleHandle if a later dispatch took the half; kOrder if the dispatch's own hook has not run.
  void require_received(DispatchId dispatch) const;

  // The same, and kOrder as choose_half.
  void require_combine(DispatchId dispatch, bool has_hook) const;

  // Records a combine, which ends the half's reservation.
  std::uint64_t record_combine(int half, bool has_hook);

  // Reserves the half for a zero-copy combine, for as long as `owner` lives or until the combine.
  void reserve(int half, const std::shared_ptr<void>& owner) { reserved_[half] = owner; }
  [[nodiscard]] bool is_reserved(int half) const { return !reserved_[half].expired(); }

  // kOrder unless `operation` is the oldest whose hook is held back.
  void require_oldest(std::uint64_t operation) const;
  // Forgets all operations, after a recovery: every handle is stale and no hook is held back.
  void restart();

  // The oldest hook has run.
  void record_received() { held_.pop_front(); }

 private:
  struct Held {
    std::uint64_t operation;
    int half;
  };

  void require_room(bool has_hook) const;
  [[nodiscard]] bool is_held(int half) const;
  std::uint64_t record(int half, bool has_hook);

  std::uint64_t next_id_ = 1;
  std::uint64_t num_operations_ = 0;
  int last_half_ = 0;
  bool last_combined_ =
      true;  // has the last dispatch been combined? (there is none before the first)
  std::array<std::uint64_t, layout::kNumHalves> owner_{};  // id of the dispatch that took the half
  std::array<std::weak_ptr<void>, layout::kNumHalves> reserved_;
  std::deque<Held> held_;  // oldest first, at most two
};

}  // namespace tandem::runtime
