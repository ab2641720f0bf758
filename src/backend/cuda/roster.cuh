// Who takes part in the operation at hand: every kernel's table of its peers' blocks, in which
// those that do not take part are null. While all do, that costs a load beside others at the start.
//
// A roster word is read without regard to the rest of an operation: it was written before the
// writer's host let its next operation begin, which is at least four before the word's own epoch,
// and rule 1 of an operation in between has waited for that one.
#pragma once

#include "backend/cuda/block_tools.cuh"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {

// The blocks of all ranks, before it is known who takes part: they never move.
__device__ inline void list_peers(const BufferView& buffer, std::byte** peers) {
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks;
       rank += static_cast<int>(blockDim.x)) {
    peers[rank] = buffer.blocks[rank];
  }
}

// Where hosts watch, every block counts itself in before it writes to peers, and out when it has
// ended: a host halts a rank that has been lost and knows that nothing of it is at work any more
// when the count is zero. Count and order to halt are one word, which has one order of changes:
// whoever counts itself in later than the order has it in the word that it changes.
__device__ __forceinline__ std::uint32_t* count_at_work(const BufferView& buffer) {
  return reinterpret_cast<std::uint32_t*>(buffer.blocks[buffer.rank] + buffer.block.at_work());
}

// By all threads. The fence is for peers' hosts: what this block has written comes before.
static __device__ __noinline__ void end_work(const BufferView& buffer) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence(buffer.across_devices != 0);
  ptx::decrement_relaxed_gpu(count_at_work(buffer));
}

// Lives from before a block's first look until it ends, whichever way.
template <bool kWatched>
class AtWork {
 public:
  __device__ __forceinline__ explicit AtWork(const BufferView& buffer) : buffer_(buffer) {}
  __device__ __forceinline__ ~AtWork() {
    if constexpr (kWatched) end_work(buffer_);
  }
  AtWork(const AtWork&) = delete;
  AtWork& operator=(const AtWork&) = delete;

 private:
  const BufferView& buffer_;
};

// What a kernel looks at before it does anything: have operations failed, or may somebody be
// absent? Loaded before, and judged after what else the kernel waits for at its start. A block asks
// once for each line of memory, since L2 serves it to one block after the other.
template <bool kWatched>
class FirstLook {
 public:
  __device__ __forceinline__ FirstLook(const BufferView& buffer, const std::byte* own) {
    constexpr int kFailedThread = kLeastThreads - 32;  // of a warp that has nothing else to do
    const int thread = static_cast<int>(threadIdx.x);
    // The roster word of a rank; behind those, the stop word.
    if (thread <= buffer.num_ranks) {
      found_ = layout::value_of(load_word(own, buffer.block.roster(thread)));
    }
    if (thread == kFailedThread) {
      found_ |= ptx::load_relaxed(&buffer.state->failed);
      if constexpr (kWatched) {
        found_ |= ptx::increment_relaxed_gpu(count_at_work(buffer)) & layout::kHalted;
      }
    }
  }

  // If one thread of a block says so, all of them call strike_absent. Where there are more words
  // than threads it looks at all of them.
  [[nodiscard]] __device__ __forceinline__ bool is_special(const BufferView& buffer) const {
    return found_ != 0 || buffer.num_ranks >= static_cast<int>(blockDim.x);
  }

 private:
  std::uint32_t found_ = 0;
};

// Makes null whoever does not take part. All threads of the block call it; `failed` on one of them:
// a wait has ended in an error. False, on all: this rank does nothing.
static __device__ __noinline__ bool strike_absent(const BufferView& buffer, Operation operation,
                                                  layout::Epoch epoch, bool failed,
                                                  std::byte** peers) {
  std::byte* own = buffer.blocks[buffer.rank];
  failed = failed || (threadIdx.x == 0 && is_halted(buffer, own));
  if (__syncthreads_or(static_cast<int>(failed)) != 0) return false;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks;
       rank += static_cast<int>(blockDim.x)) {
    std::byte* const address = own + buffer.block.roster(rank);
    const layout::Word word = load_word(address, 0);
    if (!layout::takes_part(word, epoch)) peers[rank] = nullptr;
    if (layout::settled(word) == word || !layout::has_settled(word, epoch)) continue;
    // Not if a host has written it anew meanwhile.
    atomicCAS(reinterpret_cast<unsigned long long*>(address), word, layout::settled(word));
  }
  __syncthreads();
  if (peers[buffer.rank] != nullptr) return true;
  if (threadIdx.x == 0) {
    report(buffer, operation, epoch, {ErrorCode::kMasked, Phase::kNone, buffer.rank, 0, 0, 0, 0},
           true);
  }
  return false;
}

__device__ inline void note_absence(const BufferView& buffer, int half, int rank,
                                    layout::Epoch epoch) {
  buffer.state->watch.absent[half * buffer.num_ranks + rank] = layout::make_word(epoch, 1);
}

// After a wait has ended without what it was for: whoever is lost and has not announced this
// operation takes no part in it, on any rank. All threads of the block call it. False, on all:
// operations have failed.
static __device__ __noinline__ bool strike_lost(const BufferView& buffer, layout::Epoch epoch,
                                                int half, std::byte** peers) {
  const std::byte* own = buffer.blocks[buffer.rank];
  if (__syncthreads_or(static_cast<int>(threadIdx.x == 0 && is_halted(buffer, own))) != 0) {
    return false;
  }
  bool struck = false;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks;
       rank += static_cast<int>(blockDim.x)) {
    if (peers[rank] == nullptr || !is_lost(buffer, own, rank)) continue;
    ptx::fence_sys();  // hosts have completed what it had announced, or taken it all back, before
    const layout::Word header = load_word(own, buffer.block.header(layout::parity(epoch), rank));
    if (layout::epoch_of(header) == epoch) continue;
    peers[rank] = nullptr;
    note_absence(buffer, half, rank, epoch);
    struck = true;
  }
  return __syncthreads_or(static_cast<int>(struck)) != 0;
}

// The block of a rank that does not take part yet, but does so from the next operation on; else
// null.
static __device__ __noinline__ std::byte* block_of_newcomer(const BufferView& buffer,
                                                            layout::Epoch epoch, int rank) {
  const std::byte* own = buffer.blocks[buffer.rank];
  return layout::takes_part(load_word(own, buffer.block.roster(rank)), epoch + 1)
             ? buffer.blocks[rank]
             : nullptr;
}

// Ends the receive phase of an operation: peers may overwrite what it read. Newcomers are told too.
// By the first `num_threads` threads of a block.
__device__ inline void publish_completed(const BufferView& buffer, layout::Epoch epoch,
                                         std::byte* const* peers, int num_threads) {
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks; rank += num_threads) {
    std::byte* peer = peers[rank];
    if (peer == nullptr) peer = block_of_newcomer(buffer, epoch, rank);
    if (peer == nullptr) continue;
    ptx::store_relaxed(reinterpret_cast<layout::Word*>(peer + buffer.block.completed(buffer.rank)),
                       layout::make_word(epoch, 0));
  }
}

}  // namespace tandem::cuda
