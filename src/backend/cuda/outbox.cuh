// What kernels do for peers on other hosts beside what they do for all: they ask the host's thread
// to send, and tell it where rows are to go. A peer on another host is one whose block is the
// outbox.
//
// kElsewhere, of kernels and of what is here: the buffer has such peers. Compiled in, so that
// kernels of one host are not slowed down by questions.
#pragma once

#include "backend/cuda/dispatch_shared.cuh"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/request_ring.h"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {

// Is the peer with this block on another host?
template <bool kElsewhere>
__device__ __forceinline__ bool is_elsewhere(const BufferView& buffer, const std::byte* block) {
  if constexpr (kElsewhere) return block == buffer.remote->outbox;
  return false;
}

struct DeviceMemory {
  __device__ void store(layout::Word* word, layout::Word value) const {
    ptx::store_relaxed(word, value);
  }
  __device__ void fence() const { ptx::fence_sys(); }
};

// By one thread, after a barrier behind all that the request speaks of. Waits, as long as the
// buffer's waits do, while the ring is full; after a failure nothing is sent.
static __device__ __noinline__ void post(const BufferView& buffer, const Request& request) {
  constexpr std::uint32_t kPollsPerClockRead = 1024;
  RequestRing& ring = *in_outbox<RequestRing>(buffer, buffer.remote->layout.ring());
  const std::uint64_t number =
      atomicAdd(reinterpret_cast<unsigned long long*>(&buffer.state->requests), 1ULL);  // NOLINT
  const std::uint64_t start = ptx::now_ns();
  for (std::uint32_t polls = 1; !has_room(number, ptx::load_relaxed(&ring.taken)); ++polls) {
    if (polls % kPollsPerClockRead != 0) continue;
    if (ptx::load_relaxed(&buffer.state->failed) != 0) return;
    const std::uint64_t waited = ptx::now_ns() - start;
    if (waited <= buffer.timeout_ns) continue;
    report(buffer, request.operation, request.epoch,
           {ErrorCode::kTimeout, Phase::kNone, buffer.rank, static_cast<std::int64_t>(number),
            static_cast<std::int64_t>(ring.taken), 0, waited},
           true);
    return;
  }
  // Whatever the block wrote for the host to read. The reader's `taken` was read before.
  ptx::fence_sys();
  write_request(ring, number, request, DeviceMemory());
}

// A dispatch's header, arguments and counts are in the outbox.
template <bool kElsewhere>
__device__ __forceinline__ void post_header(const DispatchParams& p, layout::Epoch epoch) {
  if constexpr (!kElsewhere) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Request request{.kind = RequestKind::kHeader,
                  .operation = Operation::kDispatch,
                  .half = static_cast<std::uint8_t>(p.half),
                  .epoch = epoch};
  for (int i = 0; i < layout::kNumArguments; ++i) request.arguments[i] = p.arguments[i];
  post(p.buffer, request);
}

// By all threads of one block, before its rows are posted: where the rows are to go.
template <bool kElsewhere>
__device__ __forceinline__ void write_first_rows(const DispatchParams& p,
                                                 const RoutingTables& tables, layout::Epoch epoch) {
  const BufferView& buffer = p.buffer;
  if constexpr (!kElsewhere) return;
  const int parity = layout::parity(epoch);
  auto* const first_rows =
      in_outbox<std::uint32_t>(buffer, buffer.remote->layout.first_rows(parity));
  auto* const halves = in_outbox<std::uint32_t>(buffer, buffer.remote->layout.halves(parity));
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < buffer.num_experts;
       expert += kNumThreads) {
    const std::int64_t begin =
        p.slotted == 0 ? 0 : buffer.rank * rows_per_source(p, tables, owner_of(tables.map[expert]));
    first_rows[expert] = static_cast<std::uint32_t>(begin) + tables.base[expert];
  }
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); p.slotted == 0 && rank < buffer.num_ranks;
       rank += kNumThreads) {
    halves[rank] = tables.halves[rank];
  }
}

// By one thread of each block, after a barrier behind its rows: the last one posts.
template <bool kElsewhere>
__device__ __forceinline__ void post_rows(const DispatchParams& p, layout::Epoch epoch,
                                          bool has_rows) {
  const BufferView& buffer = p.buffer;
  if constexpr (!kElsewhere) return;
  ptx::fence_sys();  // this block's rows, for the host
  // Acquire-release: what the other blocks wrote is what the last one posts.
  if (ptx::increment_acq_rel_gpu(&buffer.state->written) != gridDim.x - 1) return;
  buffer.state->written = 0;
  post(buffer, {.kind = RequestKind::kRows,
                .operation = Operation::kDispatch,
                .half = static_cast<std::uint8_t>(p.half),
                .has_rows = static_cast<std::uint8_t>(has_rows),
                .epoch = epoch});
}

// By one thread.
template <bool kElsewhere>
__device__ __forceinline__ void post_completed(const BufferView& buffer, Operation operation,
                                               int half, layout::Epoch epoch) {
  if constexpr (!kElsewhere) return;
  post(buffer, {.kind = RequestKind::kCompleted,
                .operation = operation,
                .half = static_cast<std::uint8_t>(half),
                .epoch = epoch});
}

// Where a row goes that this rank sends to a peer on another host, counted as it lies in the outbox
// and in the expert outputs that come back: by owner, expert, slot. `starts`: as scan_starts makes
// them of this rank's own counts, not aligned.
__device__ inline std::int64_t row_sent(const RoutingTables& tables, const std::uint32_t* starts,
                                        int expert, std::int64_t slot) {
  const std::uint32_t mapped = tables.map[expert];
  return starts[tables.first_of_rank[owner_of(mapped)] + local_of(mapped)] + slot;
}

}  // namespace tandem::cuda
