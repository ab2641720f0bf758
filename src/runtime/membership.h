// Who takes part in a buffer's operations: one view after another, on which all ranks agree.
// docs/failures.md says how ranks use it; layout/board.h where it lies.
//
// Views are numbered. Whoever wants the next one writes it into its own cell of the board and then
// changes the decision word from the view that it knows to its own, by compare-and-swap: of
// several proposals one wins, for everybody, in the time of one such exchange, and no rank's death
// holds it up.
//
// Thread safety: one caller at a time, but for amend, newest, ask, note and let_come, which a
// network's thread may call; peers act on the same memory at any time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "layout/board.h"
#include "runtime/bootstrap.h"
#include "runtime/common_memory.h"
#include "runtime/failure.h"
#include "runtime/faults.h"
#include "runtime/process_identity.h"
#include "runtime/situation.h"

namespace tandem::runtime {

using layout::Epoch;
using layout::Status;
using layout::Word;

struct View {
  std::uint32_t generation = 0;  // on this host's board
  // Names it to ranks of all hosts: the generation, where there is one host; else how many
  // decisions of all hosts it takes in (council.h), and views of one number differ in failures
  // only.
  std::uint32_t number = 0;
  int proposer = 0;
  // Not 0: operations have failed, and a recovery of this number must come first.
  std::uint32_t round = 0;
  std::vector<bool> active;        // by rank
  std::vector<Epoch> from;         // by rank: the first epoch that it takes part in
  std::vector<bool> lost;          // by rank: masked since others missed it, not when asked to
  std::optional<Failure> cause{};  // why it was decided, if something went wrong
};

// Of the view that a buffer begins with.
inline constexpr std::uint32_t kFirstGeneration = 1;

// Operations. No rank that takes part is so far behind another (two at most), so what is so long
// ago is asked for by nobody: whoever is left behind there takes part no more, whichever it has
// come to.
inline constexpr Epoch kLongAgo = 8;

class Membership {
 public:
  // Collective. The first view: the ranks of `bootstrap` are active, further ones up to `num_ranks`
  // are not. Each host has a board of its own, on which ranks of other hosts say nothing.
  Membership(Bootstrap& bootstrap, int num_ranks, Epoch first_epoch,
             SymmetricMemory::Kind kind = SymmetricMemory::Kind::kPlain);
  // Not collective: a process that is to be `rank` of a buffer whose board others share. Nothing is
  // told yet.
  Membership(Descriptor board, int rank, int num_ranks);
  // Not collective: the same of a buffer whose other ranks are all elsewhere.
  Membership(const Situation& situation, int rank);
  // Takes the rank's cell over from a process that has ended, or that there has never been. Throws
  // kOrder if there is one.
  void take_over();
  // This rank has run nothing yet, and will run no operation up to `last`: what its words say is of
  // none to come.
  void tell_no_operation(Epoch last);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int num_ranks() const { return num_ranks_; }
  [[nodiscard]] const Descriptor& board() const { return memory_.file(); }
  // Of a process that came later, across hosts: new starts that there had been before.
  [[nodiscard]] std::optional<std::uint32_t> num_earlier_starts() const {
    return num_earlier_starts_;
  }

  // The view that this rank has adopted.
  [[nodiscard]] const View& view() const { return view_; }
  // Has another been decided since? Sequentially consistent: see begin_writing.
  [[nodiscard]] bool changed() const {
    return word(board_.decision()).load(std::memory_order_seq_cst) != decision_;
  }
  // Throws kMismatch if the board is damaged.
  [[nodiscard]] View newest() const;
  // A view decided lately, by its number; nothing if it is too old to be known.
  [[nodiscard]] std::optional<View> find(std::uint32_t number) const;
  // Before take_over, it only takes note.
  void adopt(View view);

  // Proposes `next` to follow the adopted view (its number is set here). Did it win? If not,
  // another did: adopt that and think again.
  bool propose(View next);
  // Has the newest view followed by what `change` makes of it, whoever else proposes meanwhile,
  // unless it finds nothing to do and returns false.
  void amend(const std::function<bool(View&)>& change);

  // Is it on another host, and so says nothing on this board? Pairs with the release in let_come.
  [[nodiscard]] bool is_elsewhere(int rank) const {
    return is_elsewhere_[rank].load(std::memory_order_acquire);
  }
  // Another process is to be this rank, and counts as on another host from then on, wherever it is.
  // False: not while the one before it may write to this board.
  [[nodiscard]] bool let_come(int rank);
  // What a rank on another host has told of itself.
  void note(int rank, Status which, Word value) {
    elsewhere(rank, which).store(value, std::memory_order_release);  // pairs with that in ask
  }

  // Status words, a rank's own and its peers'.
  void tell(Status which, Word value) {
    own(which).store(value, std::memory_order_release);  // pairs with the acquire in ask
  }
  [[nodiscard]] Word ask(int rank, Status which) const {
    const auto told =
        is_elsewhere(rank) ? elsewhere(rank, which) : word(board_.status(rank, which));
    return told.load(std::memory_order_acquire);
  }

  // Brackets writes of rows into peers' memory. False: another view has been decided, nothing may
  // be written. The flag's store comes before the look at the decision, and who decides looks at
  // the flag afterwards, all in one order (seq_cst): either the writer sees the new view, or the
  // others see that it writes and wait.
  [[nodiscard]] bool begin_writing() {
    own(Status::kWriting).store(1, std::memory_order_seq_cst);
    seam_.pass(Point::kFlagRaised);
    if (!changed()) return true;
    end_writing();
    return false;
  }
  // Pairs with the acquire in may_be_writing: the rows come before it.
  void end_writing() { own(Status::kWriting).store(0, std::memory_order_release); }
  [[nodiscard]] bool may_be_writing(int rank) const {
    return word(board_.status(rank, Status::kWriting)).load(std::memory_order_seq_cst) != 0 &&
           !is_gone(rank);
  }

  // Will this rank never act again? Its buffer has been destroyed or its process has ended.
  [[nodiscard]] bool is_gone(int rank) const;

  // Of this rank's end of the buffer; all its parts pass their points here.
  [[nodiscard]] Seam& seam() { return seam_; }

 private:
  [[nodiscard]] ProcessIdentity process_of(int rank) const;
  void introduce();
  void forget(int rank, Epoch near);
  [[nodiscard]] std::atomic_ref<Word> word(std::int64_t offset) const {
    return std::atomic_ref<Word>(*reinterpret_cast<Word*>(memory_.data() + offset));
  }
  [[nodiscard]] std::atomic_ref<Word> own(Status which) const {
    return word(board_.status(rank_, which));
  }
  [[nodiscard]] std::atomic_ref<Word> elsewhere(int rank, Status which) const {
    return std::atomic_ref<Word>(
        told_[static_cast<std::size_t>(rank) * layout::kNumStatusWords + static_cast<int>(which)]);
  }
  // Has `next` follow the view whose decision word is `expected`.
  [[nodiscard]] bool decide(const View& next, int previous_proposer, Word expected);
  void write(const View& view, int previous_proposer);
  // The view of `generation` as `proposer` wrote it, and who proposed the one before; nothing if it
  // has been overwritten.
  struct Read {
    View view;
    int previous_proposer = 0;
  };
  [[nodiscard]] std::optional<Read> read(int proposer, std::uint32_t generation) const;

  int rank_ = 0;
  int num_ranks_ = 1;
  layout::Board board_;
  CommonMemory memory_;
  View view_;
  Word decision_ = 0;  // the decision word of view_
  ProcessIdentity process_;
  bool introduced_ = false;
  Seam seam_;
  std::vector<std::atomic<bool>> is_elsewhere_;  // by rank
  bool is_one_host_ = true;                      // all ranks share the board
  std::optional<std::uint32_t> num_earlier_starts_;
  mutable std::vector<Word> told_;  // status words of ranks elsewhere
  std::mutex proposing_;            // over this rank's proposals on the board
  std::atomic<std::uint32_t> adopted_ = kFirstGeneration;  // generation of view_, for newest
};

}  // namespace tandem::runtime
