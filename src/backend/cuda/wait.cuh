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

// Writes the record unless one is there already. Fatal errors end all waits of this buffer.
__device__ inline void report(const BufferView& buffer, Operation operation, layout::Epoch epoch,
                              const Failure& failure, bool fatal) {
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

inline constexpr std::uint32_t kPollsPerClockRead = 1024;

// Polls `address` until `ready(word)`. The word itself is the message: what else its writer wrote
// is ordered by the caller's fence.
template <typename Ready>
__device__ inline bool wait_for(const BufferView& buffer, Operation operation, layout::Epoch epoch,
                                const std::byte* address, Phase phase, int peer, Ready ready,
                                layout::Word* word) {
  const auto* source = reinterpret_cast<const layout::Word*>(address);
  std::uint64_t start = 0;
  for (std::uint32_t polls = 1;; ++polls) {
    *word = ptx::load_relaxed(source);
    if (ready(*word)) return true;
    if (polls % kPollsPerClockRead != 0) continue;
    if (ptx::load_relaxed(&buffer.state->failed) != 0) return false;
    const std::uint64_t now = ptx::now_ns();
    if (start == 0) {
      start = now;
    } else if (now - start > buffer.timeout_ns) {
      report(buffer, operation, epoch,
             {ErrorCode::kTimeout, phase, peer, static_cast<std::int64_t>(epoch),
              static_cast<std::int64_t>(layout::epoch_of(*word)), 0, now - start},
             true);
      return false;
    }
  }
}

// A word of exactly this epoch: it is overwritten only after this rank's `completed` of it.
__device__ inline bool wait_for_epoch(const BufferView& buffer, Operation operation,
                                      layout::Epoch epoch, std::int64_t offset, Phase phase,
                                      int peer, layout::Word* word) {
  return wait_for(
      buffer, operation, epoch, buffer.blocks[buffer.rank] + offset, phase, peer,
      [epoch](layout::Word seen) { return layout::epoch_of(seen) == epoch; }, word);
}

// Rules 1 and 2: peer has completed the operation of `wanted`.
__device__ inline bool wait_for_completed(const BufferView& buffer, Operation operation,
                                          layout::Epoch epoch, layout::Epoch wanted, Phase phase,
                                          int peer) {
  layout::Word word;
  return wait_for(
      buffer, operation, epoch, buffer.blocks[buffer.rank] + buffer.block.completed(peer), phase,
      peer,
      [wanted](layout::Word seen) { return layout::has_reached(layout::epoch_of(seen), wanted); },
      &word);
}

// Compares a peer's header with what this rank calls; reports the argument that differs.
__device__ inline bool check_header(const BufferView& buffer, Operation operation,
                                    layout::Epoch epoch, int peer, std::uint32_t seen_value,
                                    std::uint32_t hash,
                                    const std::uint32_t (&arguments)[layout::kNumArguments]) {
  const layout::Header seen = layout::decode_header(seen_value);
  if (seen.operation != operation) {
    report(buffer, operation, epoch,
           {ErrorCode::kMismatch, Phase::kHeader, peer, static_cast<std::int64_t>(operation),
            static_cast<std::int64_t>(seen.operation), -1, 0},
           true);
    return false;
  }
  if (seen.hash == hash) return true;
  for (int which = 0; which < layout::kNumArguments; ++which) {
    layout::Word word;
    if (!wait_for_epoch(buffer, operation, epoch,
                        buffer.block.argument(layout::parity(epoch), peer,
                                              static_cast<layout::Argument>(which)),
                        Phase::kHeader, peer, &word)) {
      return false;
    }
    if (layout::value_of(word) == arguments[which]) continue;
    report(buffer, operation, epoch,
           {ErrorCode::kMismatch, Phase::kHeader, peer,
            static_cast<std::int64_t>(arguments[which]),
            static_cast<std::int64_t>(layout::value_of(word)), which, 0},
           true);
    return false;
  }
  report(buffer, operation, epoch,
         {ErrorCode::kMismatch, Phase::kHeader, peer, hash, seen.hash, layout::kNumArguments, 0},
         true);
  return false;
}

}  // namespace tandem::cuda
