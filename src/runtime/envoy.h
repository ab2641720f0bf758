// One rank's dealings with ranks that share no board with it: it carries the council's letters,
// brings what has been decided to the board of this host, and tells others how this rank stands,
// and this rank how they do.
//
// What another rank has told stands in Membership::ask. It is told
//   - when this rank hears of a decision: that, so that all hear of it if one does, and the
//     dispatches that this rank has finished (out of order);
//   - when this rank adopts a view, or what it says of itself changes otherwise: all of it, behind
//     all rows that it has sent before;
//   - to whoever asks: for whom it waits, and what has been decided (out of order).
//
// Thread safety: one caller at a time, beside whichever thread takes in what comes.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "layout/control_word.h"
#include "runtime/council.h"
#include "runtime/membership.h"
#include "runtime/network.h"
#include "runtime/situation.h"

namespace tandem::runtime {

class Envoy {
 public:
  // The words of a source's counts that have come here for operations of this parity, one for each
  // expert; any thread calls it.
  using CountsOf = std::function<std::vector<Word>(int source, int parity)>;

  Envoy(RemotePeers& remote, Membership& membership, CountsOf counts_of);
  ~Envoy();
  Envoy(const Envoy&) = delete;
  Envoy& operator=(const Envoy&) = delete;

  // As Council's of these names.
  void propose(std::uint32_t after, const Change& change);
  [[nodiscard]] bool is_quorum(const std::vector<bool>& ranks) const;
  [[nodiscard]] std::uint32_t num_starts() const;
  // Who has had it decided that `rank` takes part, or no more; -1: nobody.
  [[nodiscard]] int changed_by(int rank) const;

  // Ranks that are lost (Change::kLose), while it is not settled what they had announced; by the
  // newest decision that this rank has heard of, whose number it is.
  struct Losses {
    std::uint32_t number = 0;
    std::vector<int> ranks = {};
  };
  [[nodiscard]] Losses losses() const;
  // Tells all what this rank has of their announcements, and nothing of them comes any more.
  void tell_holdings(std::uint32_t number, std::vector<Word> words);
  // What these have told for that number; nothing while one of them has not.
  [[nodiscard]] std::optional<std::vector<std::vector<Word>>> holdings(
      std::uint32_t number, std::span<const int> ranks) const;
  [[nodiscard]] bool has_told_holdings(int rank, std::uint32_t number) const;
  // The last one that has been decided; number 0: none.
  struct Settlement {
    std::uint32_t number = 0;
    std::vector<int> ranks = {};
    std::vector<Word> words = {};
  };
  [[nodiscard]] Settlement settlement() const;
  void take_part();

  // How the ranks stand, for a process that is to become one of them; nothing as long as this rank
  // takes no part, or does not know of all that its board does.
  [[nodiscard]] std::optional<Situation> situation() const;

  // The newest decision that this rank itself has heard of.
  [[nodiscard]] std::uint32_t number() const;
  // Tells `rank`, or all, what has been decided.
  void tell_decisions(int rank);
  void tell_decisions_in_order();
  // Tells all how this rank stands.
  void tell_standing();

  // Asks ranks elsewhere for whom they wait; returns the number of the question. Has this rank
  // answered it?
  [[nodiscard]] std::uint32_t ask(std::span<const int> ranks);
  [[nodiscard]] bool has_answered(int rank, std::uint32_t question) const;

  // Counts of a source as `witness`, which has finished `epoch`, has told them; nothing if it has
  // not.
  [[nodiscard]] std::optional<std::vector<Word>> told_counts(int witness, int source,
                                                             Epoch epoch) const;

 private:
  enum class Kind : std::uint32_t { kLetter, kStanding, kStandingInOrder, kQuestion, kHoldings };
  struct Counts {
    int source = 0;
    int parity = 0;
    std::vector<Word> words;
  };
  using Notes = std::vector<RemotePeers::Note>;

  [[nodiscard]] static RemotePeers::Note note(int to, Kind kind, std::span<const std::byte> text);
  [[nodiscard]] bool let_come(int rank, bool was_there);
  [[nodiscard]] Notes take(int source, std::span<const std::byte> text);
  [[nodiscard]] Notes answer(int source, std::span<const std::byte> text);
  [[nodiscard]] Notes carry(Council::Letters letters) const;
  void decided(std::uint32_t number, const Change& change);
  [[nodiscard]] RemotePeers::Note standing(int to, Kind kind, std::uint32_t question) const;
  void note_losses(std::uint32_t number, const Change& change);
  void take_holdings(int source, std::span<const std::byte> text);
  void take_standing(int source, Kind kind, std::span<const std::byte> text);
  // Ranks of other hosts.
  template <typename Action>
  void for_each_elsewhere(Action&& action) const;

  RemotePeers& remote_;
  Membership& membership_;
  CountsOf counts_of_;
  mutable std::mutex mutex_;  // over what follows
  Council council_;
  bool has_news_ = false;        // decided since the last look at it
  std::vector<int> changed_by_;  // by rank
  std::vector<int> lost_;        // and not settled
  Settlement settlement_;
  struct Holdings {
    std::uint32_t number = 0;
    std::vector<Word> words;
  };
  std::vector<Holdings> holdings_;         // by rank
  std::vector<std::vector<Counts>> told_;  // by witness
  std::vector<std::uint32_t> answered_;    // by rank: the newest question
  std::uint32_t num_questions_ = 0;
};

}  // namespace tandem::runtime
