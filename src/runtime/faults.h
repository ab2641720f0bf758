// The points of the protocol at which a test can make a rank fail (tests/faults/): die, stop for a
// while, lose a word, store one again or out of order. Nothing else uses it; where no test has
// asked for faults, a point costs one look at a pointer that is not there.
//
// Thread safety: points are passed by the rank's own thread, those behind a door by that one's.
#pragma once

#include <atomic>
#include <cstdint>

#include "layout/control_word.h"

namespace tandem::runtime {

// Each names what comes next, or what has just been done where it says so. tests/faults/ makes
// ranks fail at every one.
enum class Point : std::uint8_t {
  // Operations
  kBegin,         // an operation has its epoch
  kWaiting,       // it is noted for whom this rank waits
  kEntered,       // all have completed the operation before last
  kCount,         // the word of one expert's count, to one peer
  kArgument,      // the word of one argument, to one peer
  kHeader,        // the header word, to one peer
  kHeadersSent,   // nobody has been woken
  kHeadersCame,   // of all, and they agree
  kPlanAgreed,    // rows can be placed
  kFlagRaised,    // "writing rows"; whether that is allowed has not been looked at
  kSources,       // source tokens of all rows
  kRow,           // all rows of one token
  kRowsWritten,   // the flag is still up
  kFlagLowered,   // nothing has been told
  kArrived,       // the arrived word, to one peer
  kRowsCame,      // of all
  kFinished,      // "finished this dispatch, by this plan"
  kFinishedTold,  // on the board, but not yet completed
  kStaging,       // expert outputs to where peers read them
  kStaged,
  kPulling,    // rows of expert outputs
  kPulled,     // all rows have been read; whether they were still valid has not been looked at
  kCompleted,  // the completed word, to one peer

  // Who takes part
  kProposing,   // a view is to be written
  kProposed,    // it is written, but not decided
  kDecided,     // it or another; nobody has been woken
  kAdopting,    // a decided view
  kAdopted,     // it has been noted on the board
  kTakingOver,  // counts of a lost rank from one who has them

  // Coming back
  kMeeting,   // "has come to this recovery"
  kMet,       // it has been noted on the board
  kKnocking,  // "waits to be let in"
  kKnocked,   // it has been noted on the board
  kBack,      // let in, or recovered together with the others

  // Joining a running buffer
  kSeeking,      // the board, behind any rank's door
  kClaiming,     // the own door
  kClaimed,      // nobody else can be this rank; nothing is on the board
  kTakingPlace,  // of a rank that is masked
  kTookPlace,    // the board names this process; its block is not ready
  kVisiting,     // the door of a process that is let in, to map its block
  kVisited,      // it is mapped

  // Behind a door, on its thread
  kVisitor,       // nothing has been handed out
  kBlockOffered,  // the board has not been handed out
};
inline constexpr int kNumPoints = static_cast<int>(Point::kBlockOffered) + 1;

class Faults {
 public:
  virtual ~Faults() = default;

  // This rank has come to a point; `peer` where it is about one, else -1. May wait, throw anything
  // but an Error (whoever throws must not touch the buffer again but to destroy it), or end the
  // process.
  virtual void pass(Point point, int peer) = 0;

  // This rank is about to store a control word of a peer, after pass() of its point. False: it does
  // not.
  virtual bool store(Point point, int peer, std::atomic_ref<layout::Word> word,
                     layout::Word value) = 0;
};

// Where the parts of one rank's end of a buffer find its faults, if it has any.
class Seam {
 public:
  explicit Seam(Faults* faults = nullptr) : faults_(faults) {}
  void set(Faults* faults) { faults_ = faults; }

  void pass(Point point, int peer = -1) const {
    if (faults_ != nullptr) [[unlikely]]
      faults_->pass(point, peer);
  }

  // Stores a control word in a peer's block.
  void store(Point point, int peer, std::atomic_ref<layout::Word> word, layout::Word value,
             std::memory_order order) const {
    if (faults_ != nullptr) [[unlikely]] {
      faults_->pass(point, peer);
      if (!faults_->store(point, peer, word, value)) return;
    }
    word.store(value, order);
  }

 private:
  Faults* faults_;
};

}  // namespace tandem::runtime
