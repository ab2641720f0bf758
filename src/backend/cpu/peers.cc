#include "backend/cpu/peers.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::cpu {
namespace {

using layout::Status;

// Of how a rank stands that is waited for.
std::string standing(const runtime::Membership& membership, int rank) {
  const Word at = membership.ask(rank, Status::kAt);
  if (at == 0 && membership.is_elsewhere(rank)) return "it does not answer";
  const Epoch epoch = layout::epoch_of(at);
  const std::uint32_t waits_for = layout::value_of(at);
  return "it has come to operation " + std::to_string(epoch) +
         (waits_for == 0 ? "" : " and waits for rank " + std::to_string(waits_for - 1) + " there");
}

}  // namespace

Peers::Peers(const runtime::BufferPlan& plan, layout::Doorbell& doorbell,
             runtime::RemotePeers* remote, std::unique_ptr<runtime::Membership> membership,
             runtime::RosterEvents events)
    : Roster(plan,
             runtime::Waiter(doorbell, plan.options.timeout,
                             // Beside a network's thread, which must get to run for a wait to end,
                             // nobody spins.
                             remote == nullptr ? plan.num_ranks * plan.options.num_threads
                                               : std::numeric_limits<int>::max()),
             remote, std::move(membership), std::move(events)),
      on_timeout_(plan.options.on_timeout),
      everyone_(plan.num_ranks),
      newest_(plan.options.first_epoch - 1),
      settled_(membership_->view().number),
      settled_from_(plan.options.first_epoch) {
  std::iota(everyone_.begin(), everyone_.end(), 0);
  participants_.reserve(plan.num_ranks);
}

std::span<const int> Peers::participants(const Context& context) {
  if (!any_new_) return active_;
  participants_.clear();
  std::copy_if(active_.begin(), active_.end(), std::back_inserter(participants_),
               [&](int rank) { return takes_part(rank, context.epoch); });
  return participants_;
}

bool Peers::begin(const Context& context) {
  newest_ = context.epoch;
  tell_waiting_for(context, -1);
  seam().pass(Point::kBegin);
  const bool has_changed = update(context);
  if (!any_new_) return has_changed;
  // Two operations before this one may be at work yet. Epochs are compared while they are near each
  // other: a rank must not be new for ever.
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!is_new_[rank] || !layout::has_reached(context.epoch - 2, membership_->view().from[rank])) {
      continue;
    }
    is_new_[rank] = false;
    if (is_elsewhere(rank)) remote_->admit(rank, {});
  }
  list_active();
  return has_changed;
}

// The rank at the end of "waits for a rank that waits for ..."; where that leads in a circle,
// `rank`.
int Peers::end_of_chain(int rank) const {
  int at = rank;
  for (int steps = 0; steps < num_ranks_; ++steps) {
    const std::uint32_t next = layout::value_of(membership_->ask(at, Status::kAt));
    if (next == 0 || next > static_cast<std::uint32_t>(num_ranks_)) return at;
    at = static_cast<int>(next) - 1;
    if (at == rank_) break;
  }
  return rank;
}

bool Peers::give_up(const Context& context, Phase phase, Epoch wanted, const Missing& missing,
                    Epoch seen, std::chrono::nanoseconds waited, bool last_chance) {
  std::vector<int> culprits = missing.gone;
  if (culprits.empty()) culprits = not_waiting(missing.late);
  if (culprits.empty() && on_timeout_ == OnTimeout::kMask && !last_chance) return false;
  if (culprits.empty() && on_timeout_ == OnTimeout::kFail) {
    culprits.push_back(end_of_chain(missing.late.front()));
  }
  if (culprits.empty()) {
    // Its own words may be missing, where somebody has written over them; but nobody masks itself
    // with the others, or there might be no one left to let anybody in.
    culprits = missing.late;
    if (culprits.size() > 1) std::erase(culprits, rank_);
  }

  const int culprit = culprits.front();
  const bool is_gone = !missing.gone.empty();
  const runtime::Failure failure{
      .info = {.code = is_gone ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
               .operation = context.operation,
               .epoch = context.epoch,
               .phase = phase,
               .peer = culprit,
               .expected = wanted,
               .seen = seen,
               .waited = waited,
               .limit = waiter_.limit()},
      .message = "rank " + std::to_string(rank_) + " waited for " +
                 runtime::list_ranks(missing.late) + ' ' + std::string(runtime::awaited(phase)) +
                 "; " + runtime::list_ranks(culprits) +
                 (is_gone ? ' ' + gone(culprit).value_or("has ended")
                          : ": " + standing(*membership_, culprit))};
  if (on_timeout_ == OnTimeout::kFail || culprit == rank_) failure.raise();
  mask(culprits, failure);
  return true;
}

Outcome Peers::begin_writing(const Context& context) {
  if (membership_->begin_writing()) return Outcome::kReady;
  update(context);
  return Outcome::kViewChanged;
}

void Peers::finish(const Context& context, const Plan& plan) {
  seam().pass(Point::kFinished);
  membership_->tell(layout::finished(context.epoch), layout::make_word(context.epoch, plan.number));
  if (envoy_ != nullptr) {
    // See Envoy::answer.
    runtime::fence(std::memory_order_seq_cst);
    if (membership_->changed()) envoy_->tell_standing();
  }
  seam().pass(Point::kFinishedTold);
}

void Peers::require_still_active(const Context& context) {
  if (envoy_ == nullptr || !membership_->changed() || membership_->newest().active[rank_]) return;
  update(context);
}

Outcome Peers::agree_on_plan(const Context& context, Plan& plan) {
  const std::uint32_t number = membership_->view().number;
  plan.number = number;
  plan.sources.assign(static_cast<std::size_t>(num_ranks_), false);
  plan.witness = -1;
  const std::span<const int> peers = participants(context);
  for (const int peer : peers) plan.sources[peer] = true;
  if (settled_ == number && layout::has_reached(context.epoch, settled_from_)) {
    return Outcome::kReady;
  }

  const auto has_finished = [&](int peer) {
    return layout::epoch_of(finished(peer, context.epoch)) == context.epoch;
  };
  const Outcome outcome = await_or_change(
      context, Phase::kMembership, context.epoch, everyone_,
      [&](int peer) { return has_told(peer, Status::kAcked, number) || has_finished(peer); },
      [&](int peer) { return layout::epoch_of(membership_->ask(peer, Status::kAt)); });
  if (outcome == Outcome::kViewChanged) return outcome;
  settled_ = number;
  // A peer may have finished what this rank has sent, and adopted the view only then.
  settled_from_ = newest_ + 1;
  for (const int peer : peers) {
    // A rank notes that it has adopted a view after it noted what it had finished before: so it is
    // asked in the opposite order.
    if (!has_told(peer, Status::kAcked, number)) settled_ = 0;
    if (!has_finished(peer) || layout::value_of(finished(peer, context.epoch)) == number) continue;
    plan.number = layout::value_of(finished(peer, context.epoch));
    plan.witness = peer;
  }
  if (plan.witness < 0) return Outcome::kReady;
  const std::optional<runtime::View> view = membership_->find(plan.number);
  if (!view) {
    throw Error(ErrorInfo{.code = ErrorCode::kFailedBuffer,
                          .operation = context.operation,
                          .epoch = context.epoch,
                          .phase = Phase::kMembership,
                          .peer = plan.witness},
                "more ranks were lost within one operation than can be followed");
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    plan.sources[rank] = view->active[rank] && layout::has_reached(context.epoch, view->from[rank]);
  }
  return Outcome::kReady;
}

}  // namespace tandem::cpu
