// What a rank's kernels keep in device memory between operations, and the error record through
// which they tell the host: plain data, seen by both sides.
#pragma once

#include <cstdint>

#include "layout/control_word.h"
#include "tandem/types.h"

namespace tandem::cuda {

// Per half of the buffer.
struct HalfState {
  std::uint64_t dispatch_id = 0;     // of the dispatch that took it last (DispatchCall::id)
  layout::Epoch dispatch_epoch = 0;  // and its epoch
  layout::Epoch combine_epoch = 0;   // of the combine that last used its combine region (rule 2)
  std::uint32_t has_rows = 0;        // the dispatch went well: its routes may be followed
};

// Of the send or of the receive phases: with hooks they interleave.
struct PhaseCounter {
  layout::Epoch epoch = 0;    // of the next operation
  std::uint32_t tickets = 0;  // blocks of the kernel at work that have started
};

// Where hosts mask who misses the timeout: what kernels tell the host of their waits, and what they
// remember of whom they have gone on without.
struct Watch {
  layout::Word* waits = nullptr;  // [R], in pinned memory: see wait_note
  std::uint64_t note_ns = 0;      // who waits says so that often
  layout::Word* absent =
      nullptr;  // [2, R]: by half and rank, the last operation gone on without it
};

// What a kernel's wait for a rank says of itself.
TANDEM_HOST_DEVICE constexpr layout::Word wait_note(layout::Epoch epoch, std::uint32_t operation,
                                                    std::uint32_t phase) {
  return layout::make_word(epoch, 1U << 16 | phase << 8 | operation);
}

struct DeviceState {
  // Read by every block at its start, moved on by the last one of the kernel to be done.
  alignas(128) PhaseCounter send;
  alignas(128) PhaseCounter receive;
  // Blocks that have read all they need of the operation's control words. The last one ends the
  // operation: waits for arrivals, publishes `completed`, moves the counters on.
  alignas(128) std::uint32_t done = 0;
  // Not 0: a wait has ended in an error; every other wait ends, and nothing is sent any more.
  alignas(128) std::uint32_t failed = 0;
  std::uint32_t record_taken = 0;
  std::uint32_t recovered = 0;  // number of the view since which all is well: stop words before it
                                // say nothing
  // For peers on other hosts: blocks of a dispatch that have written their rows; requests so far.
  alignas(128) std::uint32_t written = 0;
  std::uint64_t requests = 0;
  alignas(128) HalfState half[2];
  Watch watch;
};

// `detail` of a mismatch that is no argument's: a count that no rank can have.
inline constexpr std::int64_t kImpossibleCount = layout::kNumArguments + 1;

// Which limit a dispatch exceeds, in the high half of the record's `detail`; the low half is the
// expert or source.
inline constexpr std::int64_t kExcessOfRank = 0;
inline constexpr std::int64_t kExcessOfExpert = 1;
inline constexpr std::int64_t kExcessOfSource = 2;

// In mapped pinned host memory; the host reads it without synchronising.
struct ErrorRecord {
  std::uint32_t written = 0;  // set last
  std::uint8_t code = 0;      // ErrorCode
  Operation operation = Operation::kNone;
  Phase phase = Phase::kNone;
  std::int32_t peer = -1;
  layout::Epoch epoch = 0;
  std::int64_t expected = 0;
  std::int64_t seen = 0;
  std::int64_t detail = 0;  // position of a wrong index; number of the argument that differs;
                            // which limit is exceeded; operation that a missing peer has come to
  std::uint64_t waited_ns = 0;
};

}  // namespace tandem::cuda
