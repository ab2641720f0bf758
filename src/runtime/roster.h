// The ranks of a buffer as the host of one of them sees them: it takes note of the views that are
// decided (membership.h), has others decided, and asks for what a caller may ask between
// operations: ranks masked and let in again, and a new start after operations have failed
// (docs/failures.md). How a backend's operations wait for those who take part is its own affair.
//
// Thread safety: one caller at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/backend.h"
#include "runtime/envoy.h"
#include "runtime/membership.h"
#include "runtime/network.h"
#include "runtime/waiter.h"

namespace tandem::runtime {

// An operation at work: what waits and errors speak of.
struct Context {
  Operation operation = Operation::kNone;
  Epoch epoch = 0;
};

// What a Roster asks of its buffer.
struct RosterEvents {
  std::function<void()> ring;                        // something may have been decided: all look
  std::function<void(std::span<const int>)> forget;  // these take part no more
  std::function<bool(int)> meet;  // maps the block of a process that is this rank now; false: gone
  // These take part from later operations on: whatever was before the first of them is over for
  // them, and they have not been told how far this rank is.
  std::function<void(std::span<const int>)> welcome = [](std::span<const int>) {};
  // Across hosts: see Envoy::CountsOf.
  Envoy::CountsOf counts_of = [](int, int) { return std::vector<Word>(); };
};

// From when on a change holds that a caller asks for, counted from the caller's next operation.
// Across hosts 0 or, where a rank that is left out sends nothing of operations from then on, more.
struct Leads {
  Epoch mask = 0;
  Epoch unmask = 2;
};

class Roster {
 public:
  // `remote`: the way to ranks on other hosts, null where there are none.
  Roster(const BufferPlan& plan, Waiter waiter, RemotePeers* remote,
         std::unique_ptr<Membership> membership, RosterEvents events, Leads leads = {});

  // Who is active, ascending.
  [[nodiscard]] std::span<const int> active() const { return active_; }
  [[nodiscard]] bool is_active(int rank) const { return is_active_[rank]; }
  // Is it reached over the network, by what is known of it now?
  [[nodiscard]] bool is_elsewhere(int rank) const { return membership_->is_elsewhere(rank); }

  // Takes note of views decided since. Was there one?
  bool look(const Context& context);
  // Throws what has failed on any rank (under its code), kFailedBuffer if one has asked for a new
  // start.
  void require_sound(const Context& context) const;
  // Throws kMasked if this rank has been masked.
  void require_active(const Context& context) const;
  // All three.
  bool update(const Context& context);

  // The view that this rank has adopted; the number of the round of failures that is to be
  // recovered from in the newest, 0 if there is none.
  [[nodiscard]] const View& view() const { return membership_->view(); }
  [[nodiscard]] std::uint32_t round() const { return newest().round; }
  // The newest one, by any thread.
  [[nodiscard]] View newest() const { return membership_->newest(); }

  // Waits for something that the host of another rank is about to do. Throws kTimeout.
  void await(const std::function<bool()>& done, const Context& context);

  // Has `write` tell peers what the newest view says, where their operations look for it. No other
  // rank does so at the same time but by the same view, and none later by an older one. Throws
  // kTimeout if a rank stopped in the middle of it.
  void write_view(const Context& context, const std::function<void()>& write);

  // Where a block cannot be mapped at the moment at which its rank is let in: that of the first
  // rank that waits for it is mapped before, and others are told. Have all active ranks mapped that
  // of `rank`, which waits?
  void meet_waiting();
  [[nodiscard]] bool has_been_met(int rank) const;

  // Tells all ranks that operations cannot go on as they are.
  void fail(const Error& error);

  // --- of operations that wait for somebody ---
  // Notes for whom this rank waits; -1: for nobody.
  void tell_waiting_for(const Context& context, int rank_or_none) {
    membership_->tell(
        layout::Status::kAt,
        layout::make_word(context.epoch, static_cast<std::uint32_t>(rank_or_none + 1)));
  }
  // Those that do not wait for somebody else inside the library.
  [[nodiscard]] std::vector<int> not_waiting(std::span<const int> ranks) const;
  // Why `rank` will never act again, if so.
  [[nodiscard]] std::optional<std::string> gone(int rank) const;
  // Has these masked, since they were missed in the operation of `cause`. Whoever wins, the next
  // look at the board tells. Throws `cause` if that cannot be decided across hosts.
  void mask(std::span<const int> ranks, const Failure& cause);
  // Before others rely on what a lost rank has left behind, or write there: until `ended` says that
  // it writes no more into the memory of others. Throws kTimeout.
  void await_end_of_writes(int rank, const Context& context, const std::function<bool()>& ended);

  // Across hosts: asks those of `ranks` that are elsewhere for whom they wait, and waits for their
  // answers, half the timeout at most. Whoever does not answer counts as waiting for nobody.
  void ask_elsewhere(std::span<const int> ranks);
  // GPU, across hosts: what lost ranks had announced. Has what `settlement` says decided, unless
  // something else has been by then; throws as decide. This rank goes by that one; do all?
  [[nodiscard]] Envoy& envoy() { return *envoy_; }
  void settle(const Change& settlement);
  void tell_settled(std::uint32_t number);
  [[nodiscard]] bool all_have_settled() const;

  // --- asked for by the caller, between operations; `next` is the epoch of the next one ---
  // True: it was this rank that had it decided.
  bool mask(int rank, const Context& next);
  bool unmask(int rank, const Context& next);
  struct Start {
    View view;            // its `from` of this rank is the epoch to go on with
    bool let_in = false;  // by others, who have gone on meanwhile; else all start together
  };
  // Meets all other active ranks, or, if this one is masked, waits to be let in. No operation of
  // this rank is at work.
  [[nodiscard]] Start recover(Epoch next);
  // Does this masked rank wait to be let in? Who does?
  [[nodiscard]] bool waits(int rank) const;
  [[nodiscard]] std::vector<int> waiting() const;
  // For a process that is to become this rank: waits until its predecessor is masked, and takes its
  // place. Returns an epoch near those of the others.
  [[nodiscard]] Epoch take_over();
  [[nodiscard]] const Descriptor& board() const { return membership_->board(); }
  // The same across hosts: makes itself known to all who take part. Throws kTimeout.
  void arrive();
  // Across hosts: lets such processes find this rank at door_address, if there is one. Throws
  // kInvalidArgument, kResource.
  void open_door(const BufferOptions& options);

  // Why the view at hand was decided, if something had gone wrong.
  [[nodiscard]] std::optional<Error> last_loss() const;

  // Where tests make this rank fail.
  [[nodiscard]] Seam& seam() { return membership_->seam(); }

 protected:
  // Has something been decided here, or gone wrong on another host?
  [[nodiscard]] bool changed() const {
    return membership_->changed() || (remote_ != nullptr && remote_->failed());
  }
  void list_active();
  [[nodiscard]] bool propose(View next);
  // The same of a rank that has noticed, or ended.
  void await_silence(int rank, const Context& context);

  int rank_;
  int num_ranks_;
  Waiter waiter_;
  RemotePeers* remote_;
  std::unique_ptr<Membership> membership_;
  RosterEvents events_;
  std::unique_ptr<Envoy> envoy_;  // null where all ranks share a board
  std::vector<bool> is_active_;   // by rank
  std::vector<bool> is_new_;      // an operation before its first may still be at work
  bool any_new_ = false;
  std::vector<int> active_;

 private:
  void propose_failure(const Failure& cause);
  void adopt(View view, const Context& context);
  // `before`: who took part.
  void meet_new(const std::vector<bool>& before);
  [[noreturn]] void throw_not_let_in(std::chrono::nanoseconds waited);
  // This rank waits no more to be let in, nor for whom it waited in an operation that failed.
  void tell_back();

  // --- roster_across_hosts.cc ---
  // Where masks hold at once, what a masked rank sends from now on is dropped. Where they lead, it
  // takes part until they hold, and sends nothing of later operations.
  [[nodiscard]] bool masks_lead() const { return leads_.mask > 0; }
  // Has all hosts decide, behind the view that this rank has adopted, what `change` says, unless
  // something else has been by then. Throws `undecided` if it cannot be: the ranks that can be
  // reached are no quorum.
  void decide(const Change& change, const Failure& undecided);
  // The same for what a caller has asked for, before it goes on with `next`; all hear of it before
  // anything else that this rank sends. Where it cannot be decided the buffer has failed, since it
  // may be later.
  void decide_or_fail(const Change& change, const Context& next);
  // Waits for another view, and not longer than that. Is there one?
  bool await_change(std::chrono::nanoseconds limit);
  [[nodiscard]] Start recover_across_hosts(Epoch next);
  void wait_to_be_let_in(Epoch next);
  [[nodiscard]] bool has_come(int rank) const {
    return rank == rank_ || remote_->has_come_to_recover(rank);
  }
  // Waits until all who are active have come to recover, or another view has been decided. Returns
  // who has not come and will not, or not in time; and how long that was waited for.
  struct Absent {
    std::vector<int> ranks;
    std::chrono::nanoseconds waited{0};
  };
  [[nodiscard]] Absent await_others();
  // After a decision for which this rank has asked, or another at the same time: was it this one's?
  [[nodiscard]] bool has_changed(int rank) const {
    return envoy_ == nullptr || envoy_->changed_by(rank) == rank_;
  }
  void shut_or_admit(int rank, const View& view);
  // Waits, not long, until this rank and `rank` are connected to each other.
  [[nodiscard]] bool await_connection(int rank);
  [[nodiscard]] std::vector<std::byte> describe_to(int rank, const std::string& options) const;
  void tell_of_adoption(std::span<const int> lost, const Context& context);

  Leads leads_;
  std::vector<Word> incarnations_;  // of the processes whose blocks are mapped
  Epoch first_epoch_;
  bool has_doors_;              // other processes may become ranks
  std::shared_ptr<void> door_;  // goes first: visitors ask this roster
};

}  // namespace tandem::runtime
