// Who takes part in the operation at hand, waiting for them, and what happens when somebody does
// not come (docs/failures.md). What has nothing to do with an operation is the Roster's.
//
// Every wait goes through await: it ends when all who take part are ready, or with an Error that
// names the culprit, or, where the buffer masks those who miss its timeout, with fewer ranks to
// wait for.
//
// Thread safety: one caller at a time.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/backend.h"
#include "runtime/membership.h"
#include "runtime/network.h"
#include "runtime/roster.h"

namespace tandem::cpu {

using layout::Epoch;
using layout::Word;
using runtime::Context;
using runtime::Point;

enum class Outcome { kReady, kViewChanged };

// Who counts as a source in a dispatch, and so where every row goes: the same on all ranks that
// finish it.
struct Plan {
  std::uint32_t number = 0;  // of a view
  std::vector<bool> sources;
  int witness = -1;  // a rank that has finished by an earlier view's plan, and has all its counts
};

class Peers : public runtime::Roster {
 public:
  // `remote`: the way to ranks on other hosts, null where there are none.
  Peers(const runtime::BufferPlan& plan, layout::Doorbell& doorbell, runtime::RemotePeers* remote,
        std::unique_ptr<runtime::Membership> membership, runtime::RosterEvents events);

  // How long waits last from now on.
  void set_timeout(std::chrono::nanoseconds timeout) { waiter_.set_limit(timeout); }

  // All ranks there may be: what to wait for where all who take part are meant, since who they are
  // may change while one waits.
  [[nodiscard]] std::span<const int> everyone() const { return everyone_; }
  // Who takes part in an operation: who is active, but for those that do from a later one on.
  // Control words go to all who are active.
  [[nodiscard]] bool takes_part(int rank, Epoch epoch) const {
    return is_active_[rank] &&
           (!is_new_[rank] || layout::has_reached(epoch, membership_->view().from[rank]));
  }
  [[nodiscard]] std::span<const int> participants(const Context& context);
  // On another host: is this peer's first operation so late that it has none to complete up to that
  // epoch? Only once it has adopted the view that says so: what it is sent before it may drop.
  [[nodiscard]] bool begins_after(int peer, Epoch epoch) const {
    const runtime::View& view = membership_->view();
    return is_elsewhere(peer) && is_new_[peer] && layout::has_reached(view.from[peer] - 1, epoch) &&
           has_told(peer, runtime::Status::kAcked, view.number);
  }

  // Starts an operation; may be called again. Has another view been adopted? Throws what has failed
  // elsewhere (under the peer's code), and kMasked if this rank has been masked.
  bool begin(const Context& context);

  // Waits until ready(peer) for all of `peers` that take part in context's operation. kViewChanged:
  // another view has been adopted meanwhile. `seen(peer)` is the epoch that an error reports.
  // Throws kTimeout, kPeerLost.
  template <typename Ready, typename Seen>
  [[nodiscard]] Outcome await_or_change(const Context& context, Phase phase, Epoch wanted,
                                        std::span<const int> peers, Ready ready, Seen seen);

  // The same, whatever becomes of the view.
  template <typename Ready, typename Seen>
  void await(const Context& context, Phase phase, Epoch wanted, std::span<const int> peers,
             Ready ready, Seen seen) {
    while (await_or_change(context, phase, wanted, peers, ready, seen) == Outcome::kViewChanged) {
    }
  }

  // Agrees with all who take part on the plan of a dispatch. kViewChanged: ask again.
  [[nodiscard]] Outcome agree_on_plan(const Context& context, Plan& plan);
  // This rank is done with a dispatch.
  void finish(const Context& context, const Plan& plan);
  // Across hosts: throws kMasked if this rank has been masked meanwhile, so that what it has read
  // may have been written over. Adopts no view.
  void require_still_active(const Context& context);
  // Counts of a lost source as a witness on another host has them.
  [[nodiscard]] std::optional<std::vector<Word>> told_counts(int witness, int source,
                                                             Epoch epoch) const {
    return is_elsewhere(witness) ? envoy_->told_counts(witness, source, epoch) : std::nullopt;
  }

  // Brackets writing of rows into peers' memory. kViewChanged: nothing may be written.
  [[nodiscard]] Outcome begin_writing(const Context& context);
  void end_writing() {
    seam().pass(Point::kRowsWritten);
    membership_->end_writing();
    seam().pass(Point::kFlagLowered);
  }

 private:
  [[nodiscard]] Word finished(int peer, Epoch epoch) const {
    return membership_->ask(peer, layout::finished(epoch));
  }
  // Has this peer come to view number `number`, by its word of that kind?
  [[nodiscard]] bool has_told(int peer, runtime::Status which, std::uint32_t number) const {
    return layout::has_reached(static_cast<std::uint32_t>(membership_->ask(peer, which)), number);
  }
  struct Missing {
    std::vector<int> late;
    std::vector<int> gone;  // of these: ended or left
  };

  template <typename Ready>
  [[nodiscard]] std::vector<int> late_among(std::span<const int> peers, Ready& ready,
                                            Epoch epoch) const {
    std::vector<int> late;
    std::copy_if(peers.begin(), peers.end(), std::back_inserter(late),
                 [&](int peer) { return takes_part(peer, epoch) && !ready(peer); });
    return late;
  }

  // Somebody did not come: throws or masks. False: those who are missing wait for others
  // themselves, who are given as long again.
  [[nodiscard]] bool give_up(const Context& context, Phase phase, Epoch wanted,
                             const Missing& missing, Epoch seen, std::chrono::nanoseconds waited,
                             bool last_chance);
  [[nodiscard]] int end_of_chain(int rank) const;

  OnTimeout on_timeout_;
  std::vector<int> everyone_;      // 0 .. R - 1
  std::vector<int> participants_;  // scratch of participants()
  Epoch newest_;                   // of the last operation that has begun
  // All who take part are known to have adopted this view, before any of them can have finished
  // this epoch.
  std::uint32_t settled_;
  Epoch settled_from_;
};

template <typename Ready, typename Seen>
Outcome Peers::await_or_change(const Context& context, Phase phase, Epoch wanted,
                               std::span<const int> peers, Ready ready, Seen seen) {
  std::size_t next = 0;  // all before it are ready
  const auto all_ready = [&] {
    while (next < peers.size() && (!takes_part(peers[next], context.epoch) || ready(peers[next])))
      ++next;
    return next == peers.size();
  };
  for (bool last_chance = false; !all_ready(); last_chance = true) {
    std::size_t noted = next;
    tell_waiting_for(context, peers[noted]);
    seam().pass(Point::kWaiting, peers[noted]);
    // A rank that is gone may have been ready before.
    const auto lost = [&](int peer) {
      return takes_part(peer, context.epoch) && gone(peer) && !ready(peer);
    };
    const auto waited = waiter_.wait(
        [&] {
          if (remote_ != nullptr) remote_->progress();
          if (all_ready() || changed()) return true;
          // Others may give up before this rank does, and blame whom it says.
          if (noted != next) tell_waiting_for(context, peers[noted = next]);
          return false;
        },
        [&] { return std::any_of(peers.begin() + next, peers.end(), lost); },
        [&] {
          if (remote_ != nullptr) remote_->rest();
        });
    if (waited && std::none_of(peers.begin() + next, peers.end(), lost)) {
      ask_elsewhere(late_among(peers.subspan(next), ready, context.epoch));
    }
    // Until it is decided what becomes of the wait, the note stays: whoever gives up at the same
    // moment must not take this rank for one that does something else.
    if (next < peers.size() && changed()) {
      tell_waiting_for(context, -1);
      update(context);
      return Outcome::kViewChanged;
    }
    Missing missing{.late = late_among(peers.subspan(next), ready, context.epoch), .gone = {}};
    std::copy_if(peers.begin() + next, peers.end(), std::back_inserter(missing.gone), lost);
    if (missing.late.empty()) {  // all have come, perhaps while the clock ran out
      tell_waiting_for(context, -1);
      break;
    }
    if (give_up(context, phase, wanted, missing, seen(missing.late.front()), *waited,
                last_chance)) {
      tell_waiting_for(context, -1);
      update(context);
      return Outcome::kViewChanged;
    }
  }
  return Outcome::kReady;
}

}  // namespace tandem::cpu
