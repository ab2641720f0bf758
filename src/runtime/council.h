// How ranks that share no memory agree on who takes part: one decision after another, the same on
// all of them (docs/failures.md). A decision is made among the members that those before it have
// left, by the single-decree Paxos of Lamport ("Paxos Made Simple", 2001): any of them proposes,
// and what more than half have accepted is decided, whoever is lost, late or cut off. Exactly half
// are enough with the lowest rank of the members among them; so of two parts one at most goes on.
//
// No clock, no network: letters go in and come out; runtime/envoy.h carries them.
//
// Thread safety: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "layout/control_word.h"
#include "runtime/failure.h"

namespace tandem::runtime {

// What is decided.
struct Change {
  enum class Kind : std::uint8_t {
    kMask,    // `ranks` take part no more
    kUnmask,  // `ranks` take part again, from epoch `from` on
    kStart,   // all that take part have met after a failure, and go on with epoch `from`
    kLose,    // GPU: as kMask, but others missed them, in the midst of an operation
    kSettle,  // what `ranks`, lost before, had announced of it: `words`, as their backend reads
              // them
  };
  Kind kind = Kind::kMask;
  int proposer = 0;
  std::vector<int> ranks = {};
  layout::Epoch from = 0;
  std::vector<layout::Word> words = {};
  std::optional<Failure> cause = {};
};

class Council {
 public:
  // Called with each decision in turn and its number, within propose or take.
  using Decided = std::function<void(std::uint32_t number, const Change& change)>;
  // `members`: of `number`, by rank. Letters go to all ranks, also to those that are none.
  Council(int rank, std::vector<bool> members, std::uint32_t number, Decided decided);

  // A process that comes later, after so many new starts, only listens until it takes part: what
  // others believe to be its word may still be that of a process that was this rank before.
  void begin_late(std::uint32_t num_starts);
  void take_part() { only_listens_ = false; }

  struct Letter {
    int to = 0;
    std::vector<std::byte> text;
  };
  using Letters = std::vector<Letter>;

  // The newest decision known here, and who takes part by it.
  [[nodiscard]] std::uint32_t number() const { return number_; }
  [[nodiscard]] const std::vector<bool>& members() const { return members_; }
  // How many decisions were new starts.
  [[nodiscard]] std::uint32_t num_starts() const { return num_starts_; }
  // Can these (by rank) decide anything?
  [[nodiscard]] bool is_quorum(const std::vector<bool>& ranks) const;

  // Tries to have `change` follow decision `after`; nothing if another has, or if this rank is no
  // member. It may take any time, or never be decided if letters are lost or others propose
  // besides: then call it again.
  [[nodiscard]] Letters propose(std::uint32_t after, const Change& change);
  // Of any rank; what makes no sense is dropped.
  [[nodiscard]] Letters take(int from, std::span<const std::byte> text);
  // What has been decided lately, for whoever may not know.
  [[nodiscard]] std::vector<std::byte> news() const;

 private:
  enum class Kind : std::uint32_t { kPrepare, kPromise, kAccept, kAccepted, kRefused, kNews };
  struct Text;

  // Ballots are unique: a turn above the rank that proposes in it.
  using Ballot = std::uint64_t;

  void send(int to, const Text& text);
  void send_all(const Text& text);
  void send_members(const Text& text);
  void handle(int from, const Text& text);
  void on_prepare(int from, const Text& text);
  void on_promise(int from, const Text& text);
  void on_accept(int from, const Text& text);
  void on_accepted(int from, const Text& text);
  void learn(const Text& text);
  void decide(const Change& change);
  [[nodiscard]] Text own_news() const;
  [[nodiscard]] Letters post();

  int rank_;
  std::vector<bool> members_;
  std::uint32_t number_;
  std::uint32_t num_starts_ = 0;
  bool only_listens_ = false;
  Decided decided_;
  std::deque<Change> log_;  // the last decisions, up to number_

  // As one who accepts, of the decision behind number_.
  Ballot promised_ = 0;  // nothing below it is accepted any more
  Ballot accepted_in_ = 0;
  std::optional<Change> accepted_;

  // As one who proposes.
  std::uint64_t turn_ = 0;  // the newest heard of
  Ballot ballot_ = 0;       // at work; 0: none
  bool is_accepting_ = false;
  Change proposed_;
  Ballot proposed_in_ = 0;  // not 0: what somebody had accepted in that one, which is kept
  std::vector<bool> agreeing_;

  Letters letters_;  // to be sent, also to this rank
};

// For letters. decode refuses what encode cannot have written.
std::vector<std::byte> encode(const Change& change);
std::optional<Change> decode_change(std::span<const std::byte> bytes, int num_ranks);

}  // namespace tandem::runtime
