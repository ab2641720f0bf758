// Bounded waits, and the error record. A wait that reaches the buffer's timeout, or finds that
// another one has, returns false; its kernel then sends nothing more and ends normally.
#pragma once

#include "backend/cuda/kernel_params.h"
#include "backend/cuda/ptx/control.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "tandem/error.h"

namespace tandem::cuda {

struct Failure {
  ErrorCode code;
  Phase phase;
  int peer;
  std::int64_t expected;
  std::int64_t seen;
  std::int64_t detail;
  std::uint64_t waited_ns;
};

// Writes the record unless one is there already. Fatal errors end all waits of this buffer. Out of
// line, like all that is not expected to happen: the kernels are short, and their code must be too.
static __device__ __noinline__ void report(const BufferView& buffer, Operation operation,
                                           layout::Epoch epoch, const Failure& failure,
                                           bool fatal) {
  DeviceState& state = *buffer.state;
  if (atomicExch(&state.record_taken, 1U) == 0) {
    ErrorRecord& record = *buffer.record;
    record.code = static_cast<std::uint8_t>(failure.code);
    record.operation = operation;
    record.phase = failure.phase;
    record.peer = failure.peer;
    record.epoch = epoch;
    record.expected = failure.expected;
    record.seen = failure.seen;
    record.detail = failure.detail;
    record.waited_ns = failure.waited_ns;
    ptx::fence_sys();  // pairs with the host's acquire of `written`
    ptx::store_relaxed(&record.written, 1U);
  }
  if (fatal) atomicExch(&state.failed, 1U);
}

__device__ __forceinline__ layout::Word load_word(const std::byte* own, std::int64_t offset) {
  return ptx::load_relaxed(reinterpret_cast<const layout::Word*>(own + offset));
}

// Have operations failed, here or elsewhere, so that nothing may be sent and nobody be waited for?
// Peers' hosts write the stop word, of which one of before the last recovery may come late, and
// halt whom they have lost.
__device__ __forceinline__ bool is_halted(const BufferView& buffer, const std::byte* own) {
  const DeviceState& state = *buffer.state;
  const layout::Word stop = load_word(own, buffer.block.stop());
  return ptx::load_relaxed(&state.failed) != 0 ||
         (layout::value_of(load_word(own, buffer.block.at_work())) & layout::kHalted) != 0 ||
         (layout::value_of(stop) != 0 &&
          !layout::has_reached(state.recovered, layout::epoch_of(stop)));
}

// What a wait is for, and what an error of it says.
struct Wait {
  Operation operation;
  layout::Epoch epoch;
  Phase phase;
  int peer;
};

__device__ __forceinline__ std::uint32_t pack(const Wait& wait) {
  return static_cast<std::uint32_t>(wait.operation) |
         (static_cast<std::uint32_t>(wait.phase) << 8) |
         (static_cast<std::uint32_t>(wait.peer) << 16);
}

// When is a word the one that is waited for?
enum class Until : std::uint8_t {
  kEqual,    // it is of exactly this epoch (overwritten only after this rank's `completed` of it)
  kReached,  // of this epoch or a later one
};

__device__ __forceinline__ bool is_ready(layout::Word word, layout::Epoch wanted, Until until) {
  return until == Until::kEqual ? layout::epoch_of(word) == wanted
                                : layout::has_reached(layout::epoch_of(word), wanted);
}

// The last operation that a peer is known here to have begun or completed.
static __device__ __noinline__ layout::Epoch last_seen_of(const BufferView& buffer,
                                                          const std::byte* own, int peer) {
  layout::Epoch last = layout::epoch_of(load_word(own, buffer.block.completed(peer)));
  for (int parity = 0; parity < 2; ++parity) {
    const layout::Epoch begun = layout::epoch_of(load_word(own, buffer.block.header(parity, peer)));
    if (layout::has_reached(begun, last)) last = begun;
  }
  return last;
}

// Has the peer been masked since others missed it? It sends nothing any more, and hosts have given
// to all who lack it what it had announced to one of them.
__device__ __forceinline__ bool is_lost(const BufferView& buffer, const std::byte* own, int peer) {
  return (layout::value_of(load_word(own, buffer.block.roster(peer))) & layout::kRosterLost) != 0;
}

enum class Ended : std::uint8_t { kReady, kFailed, kLost };

// A wait that takes longer: looks at the clock now and then. `packed`: operation, phase, peer. Out
// of line and with few arguments, so that the waits themselves stay small. Returns 0, a word that
// nobody waits for, if the wait failed or is for a lost rank. Where hosts watch it tells them for
// whom it waits, and they end it; the timeout is a longer one, for hosts that do not.
static __device__ __noinline__ layout::Word wait_slowly(const BufferView& buffer,
                                                        const layout::Word* address,
                                                        layout::Epoch wanted, Until until,
                                                        std::uint32_t packed, layout::Epoch epoch,
                                                        Ended* ended) {
  constexpr std::uint32_t kPollsPerClockRead = 1024;
  const std::uint64_t start = ptx::now_ns();
  const std::byte* own = buffer.blocks[buffer.rank];
  const auto peer = static_cast<int>(packed >> 16);
  const Watch& watch = buffer.state->watch;
  std::uint64_t next_note = watch.waits != nullptr ? watch.note_ns : ~std::uint64_t{0};
  *ended = Ended::kReady;
  for (std::uint32_t polls = 0;; ++polls) {
    const layout::Word word = ptx::load_relaxed(address);
    if (is_ready(word, wanted, until)) return word;
    if (polls % kPollsPerClockRead != 0) continue;
    if (is_halted(buffer, own)) {
      *ended = Ended::kFailed;
      return 0;
    }
    // Looked at before the word: what the peer sent, or hosts in its place, came before.
    const bool lost = is_lost(buffer, own, peer);
    // Where hosts watch it is for them to say what follows from that a connection is lost.
    const bool is_watched = watch.waits != nullptr;
    if (lost || (buffer.remote != nullptr && !is_watched &&
                 ptx::load_relaxed(&buffer.remote->lost[peer]) != 0)) {
      ptx::fence_sys();
      const layout::Word last = ptx::load_relaxed(address);
      if (is_ready(last, wanted, until)) return last;
      *ended = lost ? Ended::kLost : Ended::kFailed;
      if (lost) return 0;
      report(buffer, static_cast<Operation>(packed & 0xffU), epoch,
             {ErrorCode::kPeerLost, static_cast<Phase>((packed >> 8) & 0xffU), peer,
              static_cast<std::int64_t>(wanted), static_cast<std::int64_t>(layout::epoch_of(last)),
              0, ptx::now_ns() - start},
             true);
      return 0;
    }
    const std::uint64_t waited = ptx::now_ns() - start;
    if (waited >= next_note) {
      ptx::store_relaxed(&watch.waits[peer],
                         wait_note(epoch, packed & 0xffU, (packed >> 8) & 0xffU));
      next_note = waited + watch.note_ns;
    }
    if (waited <= buffer.timeout_ns) continue;
    report(buffer, static_cast<Operation>(packed & 0xffU), epoch,
           {ErrorCode::kTimeout, static_cast<Phase>((packed >> 8) & 0xffU), peer,
            static_cast<std::int64_t>(wanted), static_cast<std::int64_t>(layout::epoch_of(word)),
            last_seen_of(buffer, own, peer), waited},
           true);
    *ended = Ended::kFailed;
    return 0;
  }
}

// Polls until the word is ready; false if the wait failed, or is for a lost rank. The word itself
// is the message: what else its writer wrote is ordered by the caller's fence.
__device__ __forceinline__ bool wait_for(const BufferView& buffer, const Wait& wait,
                                         const std::byte* address, layout::Epoch wanted,
                                         Until until, layout::Word* word) {
  constexpr int kQuickPolls = 256;  // some 100 us
  const auto* source = reinterpret_cast<const layout::Word*>(address);
#pragma unroll 1
  for (int polls = 0; polls < kQuickPolls; ++polls) {
    const layout::Word seen = ptx::load_relaxed(source);
    if (is_ready(seen, wanted, until)) {
      *word = seen;
      return true;
    }
  }
  Ended ended;
  *word = wait_slowly(buffer, source, wanted, until, pack(wait), wait.epoch, &ended);
  return ended == Ended::kReady;
}

// A word of this operation's epoch. `own`: this rank's block.
__device__ __forceinline__ bool wait_for_epoch(const BufferView& buffer, const Wait& wait,
                                               const std::byte* own, std::int64_t offset,
                                               layout::Word* word) {
  return wait_for(buffer, wait, own + offset, wait.epoch, Until::kEqual, word);
}

static __device__ __noinline__ bool wait_for_late_completed(const BufferView& buffer,
                                                            std::uint32_t packed,
                                                            layout::Epoch epoch,
                                                            layout::Epoch wanted) {
  const auto peer = static_cast<int>(packed >> 16);
  const std::byte* own = buffer.blocks[buffer.rank];
  if (!layout::takes_part(load_word(own, buffer.block.roster(peer)), wanted)) return true;
  Ended ended;
  wait_slowly(buffer, reinterpret_cast<const layout::Word*>(own + buffer.block.completed(peer)),
              wanted, Until::kReached, packed, epoch, &ended);
  return ended != Ended::kFailed;  // a lost rank reads nothing any more
}

// Rules 1 and 2: the peer has completed the operation of `wanted`, if it took part in it.
__device__ __forceinline__ bool wait_for_completed(const BufferView& buffer, const Wait& wait,
                                                   const std::byte* own, layout::Epoch wanted) {
  const layout::Word word = load_word(own, buffer.block.completed(wait.peer));
  return is_ready(word, wanted, Until::kReached) ||
         wait_for_late_completed(buffer, pack(wait), wait.epoch, wanted);
}

// Reports what differs between a peer's header and what this rank calls.
static __device__ __noinline__ void report_mismatch(
    const BufferView& buffer, const Wait& wait, const std::byte* own, layout::Header seen,
    const std::uint32_t (&arguments)[layout::kNumArguments]) {
  const auto report_difference = [&](std::int64_t expected, std::int64_t found, int which) {
    report(buffer, wait.operation, wait.epoch,
           {ErrorCode::kMismatch, wait.phase, wait.peer, expected, found, which, 0}, true);
  };
  if (seen.operation != wait.operation) {
    report_difference(static_cast<std::int64_t>(wait.operation),
                      static_cast<std::int64_t>(seen.operation), -1);
    return;
  }
  for (int which = 0; which < layout::kNumArguments; ++which) {
    layout::Word word;
    if (!wait_for_epoch(buffer, wait, own,
                        buffer.block.argument(layout::parity(wait.epoch), wait.peer,
                                              static_cast<layout::Argument>(which)),
                        &word)) {
      return;
    }
    if (layout::value_of(word) == arguments[which]) continue;
    report_difference(arguments[which], layout::value_of(word), which);
    return;
  }
  report_difference(0, seen.hash, layout::kNumArguments);
}

// Waits for a peer's header and compares it with what this rank calls.
__device__ __forceinline__ bool wait_for_header(
    const BufferView& buffer, const Wait& wait, const std::byte* own, std::uint32_t hash,
    const std::uint32_t (&arguments)[layout::kNumArguments], int* half) {
  layout::Word word;
  if (!wait_for_epoch(buffer, wait, own, buffer.block.header(layout::parity(wait.epoch), wait.peer),
                      &word)) {
    return false;
  }
  const layout::Header header = layout::decode_header(layout::value_of(word));
  *half = header.half;
  if (header.operation == wait.operation && header.hash == hash) return true;
  report_mismatch(buffer, wait, own, header, arguments);
  return false;
}

}  // namespace tandem::cuda
