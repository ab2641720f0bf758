// Roster: what a caller asks for between operations: ranks masked and let in again, and a new start
// after operations have failed.
#include <algorithm>

#include "runtime/roster.h"
#include "tandem/error.h"

namespace tandem::runtime {

bool Roster::mask(int rank, const Context& next) {
  if (rank == rank_) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) + " cannot mask itself; destroy its buffer instead");
  }
  bool decided = false;
  for (update(next); is_active_[rank]; update(next)) {
    const Failure cause{.info = {.code = ErrorCode::kMasked, .peer = rank},
                        .message = "rank " + std::to_string(rank_) + " has called mask(" +
                                   std::to_string(rank) + ")"};
    const Epoch from = next.epoch + leads_.mask;
    if (envoy_ != nullptr) {
      decide_or_fail({.kind = Change::Kind::kMask, .ranks = {rank}, .from = from, .cause = cause},
                     next);
      decided = true;
      continue;
    }
    View view = membership_->view();
    view.active[rank] = false;
    view.from[rank] = from;
    view.cause = cause;
    decided = propose(std::move(view));
  }
  return decided && has_changed(rank);
}

bool Roster::unmask(int rank, const Context& next) {
  bool decided = false;
  for (update(next); !is_active_[rank]; update(next)) {
    if (!waits(rank)) {
      throw Error(
          ErrorInfo{.code = ErrorCode::kOrder, .peer = rank},
          "rank " + std::to_string(rank) + " does not wait to be let in: it calls recover() first");
    }
    // Peers may have begun the operation after the next, but not the one behind that, which this
    // rank would have to be done with the next one for. By then all see this view. And beyond what
    // the rank itself has sent.
    const Epoch theirs = layout::value_of(membership_->ask(rank, Status::kKnocks)) + 1;
    const Epoch ours = next.epoch + leads_.unmask;
    const Epoch from = layout::has_reached(theirs, ours) ? theirs : ours;
    if (envoy_ != nullptr) {
      decide_or_fail({.kind = Change::Kind::kUnmask, .ranks = {rank}, .from = from}, next);
      decided = true;
      continue;
    }
    View view = membership_->view();
    view.active[rank] = true;
    view.lost[rank] = false;
    view.from[rank] = from;
    view.cause.reset();
    decided = propose(std::move(view));
  }
  return decided && has_changed(rank);
}

bool Roster::waits(int rank) const {
  return membership_->ask(rank, Status::kKnocks) != 0 && !gone(rank);
}

std::vector<int> Roster::waiting() const {
  // As it is now, whatever this rank has noticed: who polls may have nothing else to do.
  const View view = membership_->newest();
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!view.active[rank] && waits(rank)) ranks.push_back(rank);
  }
  return ranks;
}

Epoch Roster::take_over() {
  while (membership_->view().active[rank_]) {
    const auto waited = waiter_.wait([&] { return membership_->changed(); });
    if (waited) {
      throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                            .phase = Phase::kSetup,
                            .peer = rank_,
                            .waited = *waited,
                            .limit = waiter_.limit()},
                  "rank " + std::to_string(rank_) +
                      " is still active: another process was it, and its peers have not masked it");
    }
    membership_->adopt(membership_->newest());
  }
  seam().pass(Point::kTakingPlace);
  membership_->take_over();
  seam().pass(Point::kTookPlace);
  is_active_ = membership_->view().active;
  list_active();
  std::fill(incarnations_.begin(), incarnations_.end(), 0);  // nobody's block is mapped yet
  const Epoch near = active_.empty()
                         ? first_epoch_ - 1
                         : layout::epoch_of(membership_->ask(active_.front(), Status::kAt));
  membership_->tell_no_operation(near - 1);  // it will be let in for a later one
  return near;
}

void Roster::throw_not_let_in(std::chrono::nanoseconds waited) {
  membership_->tell(Status::kKnocks, 0);
  throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                        .phase = Phase::kMembership,
                        .waited = waited,
                        .limit = waiter_.limit()},
              "rank " + std::to_string(rank_) +
                  " is masked, and no active rank has called unmask(" + std::to_string(rank_) +
                  ") to let it in");
}

void Roster::tell_back() {
  const Epoch last = layout::epoch_of(membership_->ask(rank_, Status::kAt));
  membership_->tell(Status::kAt, layout::make_word(last, 0));
  membership_->tell(Status::kKnocks, 0);
}

Roster::Start Roster::recover(Epoch next) {
  if (envoy_ != nullptr) return recover_across_hosts(next);
  const Context context{.operation = Operation::kNone, .epoch = next};
  bool knocked = false;
  for (;;) {
    while (membership_->changed()) adopt(membership_->newest(), context);
    const View& view = membership_->view();

    if (!is_active_[rank_]) {
      knocked = true;
      seam().pass(Point::kKnocking);
      membership_->tell(Status::kKnocks, layout::make_word(1, next));
      seam().pass(Point::kKnocked);
      const auto waited = waiter_.wait([&] { return membership_->changed(); });
      if (!waited) continue;
      throw_not_let_in(*waited);
    }
    // Let in, or recovered together with the others.
    if (view.round == 0 && layout::has_reached(view.from[rank_], next + 1)) {
      tell_back();
      seam().pass(Point::kBack);
      return {.view = view, .let_in = knocked};
    }
    if (view.round == 0) {
      View first = view;
      first.round = first.generation + 1;
      first.cause.reset();
      static_cast<void>(propose(std::move(first)));
      continue;
    }

    const std::uint32_t round = view.round;
    knocked = false;
    seam().pass(Point::kMeeting);
    membership_->tell(Status::kRecovering, layout::make_word(round, next));
    seam().pass(Point::kMet);
    events_.ring();
    const auto has_come = [&](int rank) {
      return layout::epoch_of(membership_->ask(rank, Status::kRecovering)) == round;
    };
    const auto all_have_come = [&] {
      return std::all_of(active_.begin(), active_.end(), has_come);
    };
    const std::optional<std::chrono::nanoseconds> waited =
        waiter_.wait([&] { return all_have_come() || membership_->changed(); },
                     [&] {
                       return std::any_of(active_.begin(), active_.end(), [&](int rank) {
                         return !has_come(rank) && membership_->is_gone(rank);
                       });
                     });
    if (membership_->changed()) continue;

    View after = view;
    if (waited && !all_have_come()) {
      // Whoever is gone, or has not come in time, is left behind.
      for (const int rank : active_) {
        if (has_come(rank) || (*waited < waiter_.limit() && !membership_->is_gone(rank))) continue;
        after.active[rank] = false;
        after.from[rank] = next - kLongAgo;
      }
      static_cast<void>(propose(std::move(after)));
      continue;
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!is_active_[rank]) await_silence(rank, context);
    }
    Epoch from = next;
    for (const int rank : active_) {
      const auto theirs =
          static_cast<Epoch>(layout::value_of(membership_->ask(rank, Status::kRecovering)));
      if (layout::has_reached(theirs, from)) from = theirs;
    }
    // Beyond whatever anybody may have sent.
    for (const int rank : active_) after.from[rank] = from + 2;
    after.round = 0;
    after.cause.reset();
    static_cast<void>(propose(std::move(after)));
  }
}

}  // namespace tandem::runtime
