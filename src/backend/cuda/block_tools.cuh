// Small things that a block of threads does together.
#pragma once

#include <cstdint>

#include "backend/cuda/kernel_params.h"
#include "backend/cuda/ptx/control.cuh"
#include "backend/cuda/ptx/memory.cuh"

namespace tandem::cuda {

// Hands out pieces of the dynamic shared memory; the same arithmetic sizes it on the host. (No null
// checks here: the compiler must see that the pointers are to shared memory.)
class SharedCarver {
 public:
  TANDEM_HOST_DEVICE explicit SharedCarver(std::byte* base) : base_(base) {}

  template <typename T>
  TANDEM_HOST_DEVICE T* take(std::int32_t count, std::int32_t alignment = alignof(T)) {
    used_ = (used_ + alignment - 1) / alignment * alignment;
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += count * static_cast<std::int32_t>(sizeof(T));
    return piece;
  }
  TANDEM_HOST_DEVICE std::int32_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int32_t used_ = 0;
};

// Stands for the memory where only its size is asked for.
inline std::byte* nowhere() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 20); }

// What a block learns first.
struct Start {
  layout::Epoch epoch;
  std::uint32_t ticket;
};

// The block's place in the order of starting; the first to start publishes. Kept apart from the
// epoch, which a plain load gives sooner.
__device__ inline std::uint32_t take_ticket(PhaseCounter& counter) {
  return ptx::increment_relaxed_gpu(&counter.tickets);
}

// Is this block the last of its kernel to get here? One thread of the block calls it after a
// barrier: acquire-release, pairs with the same call in the other blocks, so that what they have
// read and written happens before what the last block does next.
__device__ inline bool is_last_done(DeviceState& state) {
  return ptx::increment_acq_rel_gpu(&state.done) == gridDim.x - 1;
}

// By one thread of the last block: the next kernel finds its epochs.
__device__ inline void move_on(DeviceState& state, layout::Epoch epoch, bool send, bool receive) {
  state.done = 0;
  if (send) state.send = {epoch + 1, 0};
  if (receive) state.receive = {epoch + 1, 0};
}

// Tells the peers that all blocks of this kernel are at work: called by the last block to start.
__device__ inline void publish_started(const BufferView& buffer, layout::Epoch epoch,
                                       std::byte* const* peers) {
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks;
       rank += static_cast<int>(blockDim.x)) {
    if (peers[rank] == nullptr) continue;
    ptx::store_relaxed(
        reinterpret_cast<layout::Word*>(
            peers[rank] + buffer.block.arrived(layout::parity(epoch), buffer.rank, kStartedWord)),
        layout::make_word(epoch, 0));
  }
}

// Have all blocks of all peers' kernels of this operation started? Asked by one warp.
__device__ inline bool all_started(const BufferView& buffer, layout::Epoch epoch,
                                   const std::byte* own, std::byte* const* peers) {
  bool started = true;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x) % 32; rank < buffer.num_ranks; rank += 32) {
    const auto* word = reinterpret_cast<const layout::Word*>(
        own + buffer.block.arrived(layout::parity(epoch), rank, kStartedWord));
    started =
        started && (layout::epoch_of(ptx::load_relaxed(word)) == epoch || peers[rank] == nullptr);
  }
  return __all_sync(0xffffffffU, static_cast<int>(started)) != 0;
}

// Exclusive prefix sums of value(i), i in [0, n), handed to store(i, sum) and, for i = n, the
// total. All threads call it; `warp_sums` is kNumWarps words of shared memory. Ends with a barrier.
template <typename Value, typename Store>
__device__ inline void block_scan(int n, std::uint32_t* warp_sums, Value value, Store store) {
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (n + kNumThreads - 1) / kNumThreads;
  const int begin = min(n, thread * per_thread);
  const int end = min(n, begin + per_thread);
  std::uint32_t own = 0;
  for (int i = begin; i < end; ++i) own += value(i);
  std::uint32_t inclusive = own;
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(0xffffffffU, inclusive, step);
    if (thread % 32 >= step) inclusive += other;
  }
  if (thread % 32 == 31) warp_sums[thread / 32] = inclusive;
  __syncthreads();
  std::uint32_t sum = inclusive - own;
  std::uint32_t total = 0;
  for (int warp = 0; warp < kNumWarps; ++warp) {
    if (warp < thread / 32) sum += warp_sums[warp];
    total += warp_sums[warp];
  }
  for (int i = begin; i < end; ++i) {
    const std::uint32_t item = value(i);
    store(i, sum);
    sum += item;
  }
  if (thread == 0) store(n, total);
  __syncthreads();
}

// Stamps a phase of the operation with the device clock, for the first thread of each block.
__device__ inline void stamp(const BufferView& buffer, int phase) {
  if (buffer.trace != nullptr && threadIdx.x == 0) {
    buffer.trace[blockIdx.x * kTracePhases + phase] = ptx::now_ns();
  }
}

}  // namespace tandem::cuda
