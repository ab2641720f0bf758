// What the kernels of a combine share: what they tell each other, and when there is something to
// tell.
#pragma once

#include "backend/cuda/block_tools.cuh"
#include "backend/cuda/outbox.cuh"
#include "backend/cuda/roster.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {

// What ranks must agree on, the epoch of the dispatch among it.
struct CombineArguments {
  std::uint32_t values[layout::kNumArguments];
};
__device__ inline CombineArguments arguments_of(const CombineParams& p, const HalfState& half) {
  return {{half.dispatch_epoch, p.shape_argument, p.alignment_argument}};
}

__device__ __forceinline__ bool holds_rows_of(const CombineParams& p, const HalfState& half) {
  return half.dispatch_id == p.dispatch_id && half.has_rows != 0;
}

// `ready` to every peer: by one warp, whose fence before this releases what the earlier kernels of
// the stream, or this kernel's blocks, wrote to the combine region. Pairs with the fence after the
// wait for headers in combine_kernel.
template <bool kElsewhere>
__device__ void publish_ready(const CombineParams& p, const HalfState& half,
                              const CombineArguments& arguments, layout::Epoch epoch,
                              std::byte* const* peers) {
  const BufferView& buffer = p.buffer;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int parity = layout::parity(epoch);
  const std::uint32_t header = layout::encode(
      layout::Header{Operation::kCombine, p.half, layout::hash_arguments(arguments.values)});
#pragma unroll 1
  for (int rank = lane; rank < buffer.num_ranks; rank += 32) {
    if (peers[rank] == nullptr) continue;
    const auto store = [&](std::int64_t offset, std::uint32_t value) {
      ptx::store_relaxed(reinterpret_cast<layout::Word*>(peers[rank] + offset),
                         layout::make_word(epoch, value));
    };
    store(buffer.block.header(parity, buffer.rank), header);
#pragma unroll
    for (int which = 0; which < layout::kNumArguments; ++which) {
      store(buffer.block.argument(parity, buffer.rank, static_cast<layout::Argument>(which)),
            arguments.values[which]);
    }
  }
  if constexpr (!kElsewhere) return;
  if (lane != 0) return;
  Request request{.kind = RequestKind::kReady,
                  .operation = Operation::kCombine,
                  .half = static_cast<std::uint8_t>(p.half),
                  .has_rows = static_cast<std::uint8_t>(holds_rows_of(p, half)),
                  .epoch = epoch};
  for (int i = 0; i < layout::kNumArguments; ++i) request.arguments[i] = arguments.values[i];
  post(buffer, request);
}

// The handle's dispatch is the one that this half holds; else, reported, there is nothing to send.
__device__ inline bool is_fresh(const CombineParams& p, const HalfState& half, layout::Epoch epoch,
                                bool reports) {
  if (half.dispatch_id == p.dispatch_id) return half.has_rows != 0;
  if (reports) {
    report(p.buffer, Operation::kCombine, epoch,
           {ErrorCode::kStaleHandle, Phase::kNone, -1, static_cast<std::int64_t>(p.dispatch_id),
            static_cast<std::int64_t>(half.dispatch_id), 0, 0},
           false);
  }
  return false;
}

}  // namespace tandem::cuda
