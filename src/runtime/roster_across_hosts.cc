// Roster: what is different where ranks are on several hosts and there is no board for all of them.
// Masks, returns and new starts are decided by the council (council.h), and come to each host's
// board from there.
#include <algorithm>

#include "runtime/agreement.h"
#include "runtime/roster.h"
#include "tandem/error.h"

namespace tandem::runtime {
namespace {

// Several ranks notice the same at once, and would keep each other from being heard: each gives
// those before it so long first. A decision takes two round trips.
constexpr std::chrono::milliseconds kTurn{10};
constexpr std::chrono::milliseconds kLongestTurn{100};
// After so long without a decision a rank proposes again; longer each time.
constexpr std::chrono::milliseconds kPatience{40};
// How long the others wait for a connection to a process that is let in.
constexpr std::chrono::milliseconds kLongestMeeting{2000};
// So often a process that arrives turns to those whom it has not met, of whose hellos the last one
// counts.
constexpr std::chrono::milliseconds kSayAgain{100};

}  // namespace

bool Roster::await_change(std::chrono::nanoseconds limit) {
  const auto waited = waiter_.within(limit).wait(
      [&] {
        remote_->progress();
        return membership_->changed();
      },
      [] { return false; }, [&] { remote_->rest(); });
  return !waited;
}

void Roster::decide(const Change& wanted, const Failure& undecided) {
  Change change = wanted;
  change.proposer = rank_;
  const auto is_left_out = [&](int rank) {
    return change.kind == Change::Kind::kMask &&
           std::ranges::find(change.ranks, rank) != change.ranks.end();
  };
  const auto before_me = std::count_if(active_.begin(), active_.end(), [&](int rank) {
    return rank < rank_ && !is_left_out(rank) && !gone(rank);
  });
  const auto turn = std::min<std::chrono::nanoseconds>(before_me * kTurn, kLongestTurn);
  const auto start = std::chrono::steady_clock::now();
  for (int attempt = 1;; ++attempt) {
    if (await_change(turn)) return;
    std::vector<bool> in_reach = is_active_;
    for (const int rank : active_) in_reach[rank] = rank == rank_ || !gone(rank);
    const bool is_over = std::chrono::steady_clock::now() - start >= waiter_.limit();
    if (is_over || !envoy_->is_quorum(in_reach)) {
      Failure failure = undecided;
      failure.message +=
          "; it cannot be decided who goes on: that takes more than half of the ranks that have "
          "taken part, or half of them with the lowest";
      failure.raise();
    }
    envoy_->propose(membership_->view().number, change);
    if (await_change(attempt * kPatience)) return;
  }
}

void Roster::decide_or_fail(const Change& change, const Context& next) {
  const Failure undecided{.info = {.code = ErrorCode::kTimeout,
                                   .operation = next.operation,
                                   .epoch = next.epoch,
                                   .phase = Phase::kMembership,
                                   .peer = change.ranks.front(),
                                   .limit = waiter_.limit()},
                          .message = "rank " + std::to_string(rank_) + " has called " +
                                     (change.kind == Change::Kind::kMask ? "mask(" : "unmask(") +
                                     std::to_string(change.ranks.front()) + ")"};
  try {
    decide(change, undecided);
  } catch (const Error& error) {
    fail(error);
    throw;
  }
  envoy_->tell_decisions_in_order();
}

void Roster::ask_elsewhere(std::span<const int> ranks) {
  if (envoy_ == nullptr) return;
  std::vector<int> asked;
  std::ranges::copy_if(ranks, std::back_inserter(asked),
                       [&](int rank) { return is_elsewhere(rank); });
  if (asked.empty()) return;
  const std::uint32_t question = envoy_->ask(asked);
  const auto is_silent = [&](int rank) {
    return !envoy_->has_answered(rank, question) && !gone(rank);
  };
  static_cast<void>(waiter_.within(waiter_.limit() / 2)
                        .wait(
                            [&] {
                              remote_->progress();
                              return membership_->changed() ||
                                     std::ranges::none_of(asked, is_silent);
                            },
                            [] { return false; }, [&] { remote_->rest(); }));
  for (const int rank : asked) {
    if (!envoy_->has_answered(rank, question)) membership_->note(rank, Status::kAt, 0);
  }
}

// A rank that is lost may have begun the operation that it was missed in, and with a hook the next.
void Roster::shut_or_admit(int rank, const View& view) {
  if (masks_lead()) {
    if (!view.active[rank] && view.lost[rank]) remote_->admit(rank, view.from[rank] + 3);
    return;
  }
  if (view.active[rank]) {
    remote_->admit(rank, view.from[rank]);
  } else {
    remote_->shut(rank);
  }
}

// A rank that is late may still read what this one is about to use again. It hears why before that,
// from this rank, which so must know itself what another of this host may have brought to the
// board.
void Roster::tell_of_adoption(std::span<const int> lost, const Context& context) {
  const std::uint32_t number = membership_->view().number;
  const auto waited = waiter_.wait(
      [&] {
        remote_->progress();
        return layout::has_reached(envoy_->number(), number);
      },
      [] { return false; }, [&] { remote_->rest(); });
  if (waited) {
    throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                          .operation = context.operation,
                          .epoch = context.epoch,
                          .phase = Phase::kMembership,
                          .peer = membership_->view().proposer,
                          .waited = *waited,
                          .limit = waiter_.limit()},
                "rank " + std::to_string(rank_) + " has not heard what has been decided");
  }
  for (const int rank : lost) {
    if (is_elsewhere(rank) && !is_active_[rank]) envoy_->tell_decisions(rank);
  }
  envoy_->tell_standing();
}

void Roster::settle(const Change& settlement) {
  decide(settlement,
         {.info = {.code = ErrorCode::kTimeout,
                   .phase = Phase::kMembership,
                   .peer = settlement.ranks.front(),
                   .limit = waiter_.limit()},
          .message = list_ranks(settlement.ranks) + " were lost in the midst of an operation"});
}

void Roster::tell_settled(std::uint32_t number) {
  membership_->tell(Status::kSettled, number);
  envoy_->tell_standing();
}

bool Roster::all_have_settled() const {
  const std::uint32_t number = envoy_->settlement().number;
  return std::ranges::all_of(active_, [&](int rank) {
    const auto settled = static_cast<std::uint32_t>(membership_->ask(rank, Status::kSettled));
    return layout::has_reached(settled, number);
  });
}

bool Roster::await_connection(int rank) {
  seam().pass(Point::kVisiting, rank);
  const auto limit = std::min<std::chrono::nanoseconds>(kLongestMeeting, waiter_.limit() / 2);
  const auto waited = waiter_.within(limit).wait(
      [&] {
        remote_->progress();
        return remote_->has_met(rank);
      },
      [] { return false; }, [&] { remote_->rest(); });
  return !waited;
}

// Others may be about to become the same rank. All of them turn to the lowest rank first, and whom
// that one has let come goes on to the others, so that no two have a part of the ranks each.
//
// What is decided meanwhile may be about one of them, or about the process before, even that it is
// let in. Whoever knows that it was does not turn to this process until it is masked again; so once
// all have, and what they know has been heard, it is this one that is meant.
void Roster::arrive() {
  const auto is_missing = [&](int rank) { return rank != rank_ && !remote_->has_met(rank); };
  const auto start = std::chrono::steady_clock::now();
  std::uint32_t question = 0;
  bool has_asked_all = false;
  seam().pass(Point::kTakingPlace);
  for (;;) {
    std::vector<int> missing;
    std::vector<int> met;
    const View view = membership_->newest();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (view.active[rank]) (is_missing(rank) ? missing : met).push_back(rank);
    }
    std::erase(met, rank_);  // the process before
    const auto has_answered = [&](int rank) { return envoy_->has_answered(rank, question); };
    if (missing.empty() && has_asked_all && std::ranges::all_of(met, has_answered)) break;
    const bool is_first = !missing.empty() && (met.empty() || met.front() > missing.front());
    for (int rank = 0; rank < num_ranks_ && !missing.empty(); ++rank) {
      if (is_first ? rank == missing.front() : is_missing(rank)) remote_->say_hello(rank);
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= waiter_.limit()) {
      const std::vector<int>& silent = missing.empty() ? met : missing;
      throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                            .phase = Phase::kSetup,
                            .peer = silent.front(),
                            .waited = waited,
                            .limit = waiter_.limit()},
                  list_ranks(silent) + " did not turn to this process, which is to be rank " +
                      std::to_string(rank_) + ": out of reach, or connected to another still");
    }
    // Somebody who is missing may be so for good, which was decided before others knew of this
    // process.
    question = envoy_->ask(met);
    has_asked_all = missing.empty();
    static_cast<void>(waiter_.within(kSayAgain).wait(
        [&] {
          remote_->progress();
          if (has_asked_all) return std::ranges::all_of(met, has_answered);
          return is_first ? !is_missing(missing.front())
                          : std::ranges::none_of(missing, is_missing);
        },
        [] { return false; }, [&] { remote_->rest(); }));
  }
  envoy_->take_part();
  seam().pass(Point::kTookPlace);
}

void Roster::open_door(const BufferOptions& options) {
  if (options.door_address.empty()) return;
  door_ = remote_->open_door(
      rank_, options.door_address,
      [this, text = describe_options(options)](int rank) { return describe_to(rank, text); });
}

std::vector<std::byte> Roster::describe_to(int rank, const std::string& options) const {
  const auto refuse = [&](ErrorCode code, const std::string& why) {
    throw Error(ErrorInfo{.code = code, .phase = Phase::kSetup, .peer = rank}, why);
  };
  std::optional<Situation> situation = envoy_->situation();
  if (!situation) {
    refuse(ErrorCode::kTimeout, "rank " + std::to_string(rank_) + " takes no part at the moment");
  }
  if (rank >= 0 && rank < num_ranks_ && situation->active[rank]) {
    refuse(ErrorCode::kTimeout,
           "rank " + std::to_string(rank) +
               " is still active: another process was it, and its peers have not masked it");
  }
  situation->options = options;
  return encode(*situation);
}

Roster::Absent Roster::await_others() {
  const auto is_missing = [&](int rank) { return !has_come(rank); };
  const auto is_lost = [&](int rank) { return is_missing(rank) && gone(rank); };
  const auto waited = waiter_.wait(
      [&] {
        remote_->progress();
        return membership_->changed() || std::ranges::none_of(active_, is_missing);
      },
      [&] { return std::ranges::any_of(active_, is_lost); }, [&] { remote_->rest(); });
  if (!waited) return {};
  const bool is_late = *waited >= waiter_.limit();
  Absent absent{.ranks = {}, .waited = *waited};
  std::ranges::copy_if(active_, std::back_inserter(absent.ranks),
                       [&](int rank) { return is_missing(rank) && (is_late || gone(rank)); });
  return absent;
}

void Roster::wait_to_be_let_in(Epoch next) {
  seam().pass(Point::kKnocking);
  membership_->tell(Status::kKnocks, layout::make_word(1, next));
  envoy_->tell_standing();
  seam().pass(Point::kKnocked);
  if (await_change(waiter_.limit())) return;
  try {
    throw_not_let_in(waiter_.limit());
  } catch (...) {
    envoy_->tell_standing();
    throw;
  }
}

// Each active rank tells all others that it has come, and its next epoch, behind all that it has
// sent before: so no row of an operation that has failed comes later, to be written over another's.
// Who sees all of them there proposes the start.
Roster::Start Roster::recover_across_hosts(Epoch next) {
  const Context context{.operation = Operation::kNone, .epoch = next};
  bool knocked = false;
  for (;;) {
    while (membership_->changed()) adopt(membership_->newest(), context);
    const View& view = membership_->view();

    if (!is_active_[rank_]) {
      knocked = true;
      wait_to_be_let_in(next);
      continue;
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!is_active_[rank]) await_silence(rank, context);
    }
    // Let in, or recovered together with the others.
    if (view.round == 0 && layout::has_reached(view.from[rank_], next + 1)) {
      tell_back();
      remote_->recovered(envoy_->num_starts());
      // So that all take what this rank says from now on.
      envoy_->tell_decisions_in_order();
      membership_->tell(Status::kSettled, view.number);
      envoy_->tell_standing();
      seam().pass(Point::kBack);
      return {.view = view, .let_in = knocked};
    }

    remote_->come_to_recover(next, membership_->newest().cause);
    const Absent absent = await_others();
    if (membership_->changed()) continue;
    if (!absent.ranks.empty()) {
      const int culprit = absent.ranks.front();
      const std::optional<std::string> why = gone(culprit);
      const Failure cause{.info = {.code = why ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
                                   .phase = Phase::kMembership,
                                   .peer = culprit,
                                   .waited = absent.waited,
                                   .limit = waiter_.limit()},
                          .message = "rank " + std::to_string(culprit) + " " +
                                     why.value_or("has not called recover()")};
      decide({.kind = Change::Kind::kMask,
              .ranks = absent.ranks,
              .from = next - kLongAgo,
              .cause = cause},
             cause);
      continue;
    }
    if (!std::ranges::all_of(active_, [&](int rank) { return has_come(rank); })) continue;
    Epoch from = next;
    for (const int rank : active_) {
      const std::optional<Epoch> theirs = remote_->has_come_to_recover(rank);
      if (theirs && layout::has_reached(*theirs, from)) from = *theirs;
    }
    // Beyond whatever anybody may have sent.
    decide({.kind = Change::Kind::kStart, .from = from + 2},
           {.info = {.code = ErrorCode::kTimeout, .phase = Phase::kMembership, .peer = rank_},
            .message = "rank " + std::to_string(rank_) + " has called recover()"});
  }
}

}  // namespace tandem::runtime
