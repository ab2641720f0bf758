#include "runtime/roster.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tandem/error.h"

namespace tandem::runtime {

Roster::Roster(const BufferPlan& plan, Waiter waiter, RemotePeers* remote,
               std::unique_ptr<Membership> membership, RosterEvents events, Leads leads)
    : rank_(plan.rank),
      num_ranks_(plan.num_ranks),
      waiter_(waiter),
      remote_(remote),
      membership_(std::move(membership)),
      events_(std::move(events)),
      is_active_(membership_->view().active),
      is_new_(plan.num_ranks),
      leads_(leads),
      incarnations_(plan.num_ranks),
      first_epoch_(plan.options.first_epoch),
      has_doors_(!plan.options.door.empty()) {
  active_.reserve(plan.num_ranks);
  list_active();
  for (const int rank : active_) incarnations_[rank] = 1;  // mapped when the buffer was made
  if (remote_ != nullptr) {
    envoy_ = std::make_unique<Envoy>(*remote_, *membership_, events_.counts_of);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (is_elsewhere(rank) && !is_active_[rank]) remote_->shut(rank);
    }
  }
  seam().set(plan.faults);
}

void Roster::list_active() {
  active_.clear();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (is_active_[rank]) active_.push_back(rank);
  }
  any_new_ = std::find(is_new_.begin(), is_new_.end(), true) != is_new_.end();
}

std::optional<std::string> Roster::gone(int rank) const {
  if (remote_ != nullptr) {
    if (auto why = remote_->lost(rank)) return why;
  }
  if (membership_->is_gone(rank)) return "has ended";
  return {};
}

bool Roster::look(const Context& context) {
  const View& known = membership_->view();
  if (remote_ != nullptr && remote_->failed() && known.round == 0 && known.active[rank_]) {
    // Whoever told it may not reach all.
    const Failure failure = remote_->failure();
    propose_failure(failure);
    remote_->send_failure(failure);
  }
  const bool changed = membership_->changed();
  while (membership_->changed()) adopt(membership_->newest(), context);
  return changed;
}

void Roster::require_active(const Context& context) const {
  const View& view = membership_->view();
  if (view.active[rank_]) return;
  const std::string why = view.cause ? ": " + view.cause->message : "";
  throw Error(ErrorInfo{.code = ErrorCode::kMasked,
                        .operation = context.operation,
                        .epoch = context.epoch,
                        .peer = view.proposer},
              "rank " + std::to_string(rank_) +
                  " has been masked and takes part no more until it recovers" + why);
}

void Roster::require_sound(const Context& context) const {
  const View& view = membership_->view();
  if (view.round == 0) return;
  if (view.cause) view.cause->raise();
  throw Error(ErrorInfo{.code = ErrorCode::kFailedBuffer,
                        .operation = context.operation,
                        .epoch = context.epoch,
                        .peer = view.proposer},
              "rank " + std::to_string(view.proposer) + " has called recover()");
}

bool Roster::update(const Context& context) {
  const bool changed = look(context);
  require_active(context);
  require_sound(context);
  return changed;
}

void Roster::adopt(View view, const Context& context) {
  const View& known = membership_->view();
  const std::vector<bool> before = known.active;
  std::vector<int> lost;
  std::vector<int> coming;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const bool stays =
        known.active[rank] && view.active[rank] && view.from[rank] == known.from[rank];
    if (stays) continue;
    if (is_active_[rank]) lost.push_back(rank);
    if (view.active[rank]) coming.push_back(rank);
    is_active_[rank] = view.active[rank];
    is_new_[rank] = view.active[rank];
    if (is_elsewhere(rank)) shut_or_admit(rank, view);
  }
  membership_->adopt(std::move(view));
  list_active();
  if (!is_active_[rank_]) return;
  for (const int rank : lost) await_silence(rank, context);
  events_.forget(lost);
  meet_new(before);
  events_.welcome(coming);
  if (envoy_ == nullptr) return;
  tell_of_adoption(lost, context);
}

// Maps the blocks of processes that have taken a rank's place, or sees to it that there is a
// connection. One that has gone again is masked.
void Roster::meet_new(const std::vector<bool>& before) {
  std::vector<int> gone;
  for (const int rank : active_) {
    if (rank == rank_) continue;
    if (is_elsewhere(rank)) {
      const bool is_new = !before[rank] || !before[rank_];
      if (is_new && has_doors_ && !await_connection(rank)) gone.push_back(rank);
      continue;
    }
    const Word incarnation = membership_->ask(rank, Status::kIncarnation);
    if (incarnation == incarnations_[rank]) continue;
    if (events_.meet(rank)) {
      incarnations_[rank] = incarnation;
    } else {
      gone.push_back(rank);
    }
  }
  if (gone.empty()) return;
  mask(gone, {.info = {.code = ErrorCode::kPeerLost,
                       .epoch = membership_->view().from[gone[0]] - 1,
                       .phase = Phase::kMembership,
                       .peer = gone[0]},
              .message = list_ranks(gone) + " went away while being let in"});
}

void Roster::meet_waiting() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (is_active_[rank] || !waits(rank)) continue;
    const Word incarnation = membership_->ask(rank, Status::kIncarnation);
    if (incarnation != incarnations_[rank]) {
      if (!events_.meet(rank)) continue;
      incarnations_[rank] = incarnation;
    }
    membership_->tell(Status::kMet, layout::make_word(static_cast<Epoch>(incarnation), rank + 1));
    return;
  }
}

bool Roster::has_been_met(int rank) const {
  const Word incarnation = membership_->ask(rank, Status::kIncarnation);
  const Word met = layout::make_word(static_cast<Epoch>(incarnation), rank + 1);
  return std::all_of(active_.begin(), active_.end(), [&](int peer) {
    return membership_->ask(peer, Status::kMet) == met || membership_->is_gone(peer);
  });
}

// A rank that was stopped while it wrote may go on writing when it wakes up, wherever this
// operation's rows were to go. Until it has ended, or has noticed, that memory cannot serve
// another.
void Roster::await_silence(int rank, const Context& context) {
  await_end_of_writes(rank, context, [&] {
    return is_elsewhere(rank) ? !remote_->is_receiving(rank) : !membership_->may_be_writing(rank);
  });
}

void Roster::await_end_of_writes(int rank, const Context& context,
                                 const std::function<bool()>& ended) {
  const auto waited = waiter_.wait([&] {
    if (remote_ != nullptr) remote_->progress();
    return ended();
  });
  if (!waited) return;
  throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                        .operation = context.operation,
                        .epoch = context.epoch,
                        .phase = Phase::kMembership,
                        .peer = rank,
                        .waited = *waited,
                        .limit = waiter_.limit()},
              "rank " + std::to_string(rank) +
                  " stopped in the middle of writing into the memory of others: as long as its "
                  "process lives, what it may still write to cannot be used again");
}

bool Roster::propose(View next) {
  const bool won = membership_->propose(std::move(next));
  seam().pass(Point::kDecided);
  events_.ring();
  return won;
}

void Roster::mask(std::span<const int> ranks, const Failure& cause) {
  if (envoy_ != nullptr) {
    decide({.kind = masks_lead() ? Change::Kind::kLose : Change::Kind::kMask,
            .ranks = {ranks.begin(), ranks.end()},
            .from = static_cast<Epoch>(cause.info.epoch + 1),
            .cause = cause},
           cause);
    return;
  }
  View next = membership_->view();
  for (const int rank : ranks) {
    next.active[rank] = false;
    next.lost[rank] = true;
    next.from[rank] = cause.info.epoch + 1;
  }
  next.cause = cause;
  static_cast<void>(propose(std::move(next)));  // whoever wins, the next look at the board tells
}

std::vector<int> Roster::not_waiting(std::span<const int> ranks) const {
  std::vector<int> result;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(result), [this](int rank) {
    return layout::value_of(membership_->ask(rank, Status::kAt)) == 0;
  });
  return result;
}

void Roster::fail(const Error& error) {
  const View& view = membership_->view();
  if (view.round != 0 || !view.active[rank_]) return;  // it has been told
  const Failure cause{.info = error.info(), .message = error.message()};
  propose_failure(cause);
  if (remote_ != nullptr) remote_->send_failure(cause);
}

void Roster::propose_failure(const Failure& cause) {
  const auto add_failure = [&](View& view) {
    view.round = view.generation + 1;
    view.cause = cause;
  };
  if (envoy_ == nullptr) {
    View next = membership_->view();
    add_failure(next);
    static_cast<void>(propose(std::move(next)));
    return;
  }
  // Decisions of all hosts come to this board at any time, and do not make it undone.
  membership_->amend([&](View& next) {
    if (next.round != 0 || !next.active[rank_]) return false;
    add_failure(next);
    return true;
  });
  events_.ring();
}

// The flag comes before the look at the decision, and who has a view decided looks at the flags
// afterwards: whoever would write by the view before has either seen that there is a newer one, or
// is waited for.
void Roster::write_view(const Context& context, const std::function<void()>& write) {
  do {
    do {
      look(context);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (rank != rank_ && !is_elsewhere(rank)) await_silence(rank, context);
      }
    } while (!membership_->begin_writing());
    try {
      write();
    } catch (...) {
      membership_->end_writing();
      throw;
    }
    membership_->end_writing();
    // Ranks elsewhere raise no flag here. What they write comes behind their decision: where it has
    // come meanwhile, what they wrote may just have been written over.
  } while (envoy_ != nullptr && membership_->changed());
}

void Roster::await(const std::function<bool()>& done, const Context& context) {
  const auto waited = waiter_.wait(done);
  if (!waited) return;
  throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                        .operation = context.operation,
                        .epoch = context.epoch,
                        .phase = Phase::kMembership,
                        .peer = view().proposer,
                        .waited = *waited,
                        .limit = waiter_.limit()},
              "rank " + std::to_string(rank_) + " waited for rank " +
                  std::to_string(view().proposer) + " to tell it who takes part");
}

std::optional<Error> Roster::last_loss() const {
  const std::optional<Failure>& cause = membership_->view().cause;
  if (!cause) return {};
  return Error(cause->info, cause->message);
}

}  // namespace tandem::runtime
