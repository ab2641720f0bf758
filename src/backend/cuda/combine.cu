// Combine: `ready` to every peer, then each token's K rows from their owners, weighted and summed;
// and the kernel that stages a caller's tensor into the combine region first.
#include "backend/cuda/block_tools.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/row_copy.cuh"
#include "backend/cuda/row_ring.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kCombine;
constexpr int kUnroll = 8;  // rows in flight per thread

struct CombineShared {
  std::byte** peers;            // [R]
  const std::byte** row_bases;  // [R]: first row of each peer's combine region
  Start* start;
  int* flag;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE CombineShared(std::byte* storage, int num_ranks) {
    SharedCarver carver(storage);
    peers = carver.take<std::byte*>(num_ranks);
    row_bases = carver.take<const std::byte*>(num_ranks);
    start = carver.take<Start>(1);
    flag = carver.take<int>(1);
    size_bytes = carver.used();
  }
};

// What ranks must agree on, the epoch of the dispatch among it.
struct Arguments {
  std::uint32_t values[layout::kNumArguments];
};
__device__ Arguments arguments_of(const CombineParams& p) {
  return {{p.buffer.state->half[p.half].dispatch_epoch, p.shape_argument,
           p.alignment_argument}};
}

// Publishes `ready`. The fence that precedes (in every thread that calls this) releases what the
// earlier kernels of the stream, or this kernel's blocks, wrote to the combine region; pairs with
// the fence after the wait for headers in combine_kernel.
__device__ void publish_ready(const CombineParams& p, layout::Epoch epoch,
                              std::byte* const* peers) {
  const BufferView& buffer = p.buffer;
  const int parity = layout::parity(epoch);
  const Arguments arguments = arguments_of(p);
  const std::uint32_t header = layout::encode(
      layout::Header{kOperation, p.half, layout::hash_arguments(arguments.values)});
  for (int rank = static_cast<int>(threadIdx.x); rank < buffer.num_ranks; rank += kNumThreads) {
    for (int which = 0; which < layout::kNumArguments; ++which) {
      ptx::store_relaxed(
          reinterpret_cast<layout::Word*>(
              peers[rank] + buffer.block.argument(parity, buffer.rank,
                                                  static_cast<layout::Argument>(which))),
          layout::make_word(epoch, arguments.values[which]));
    }
    ptx::store_relaxed(
        reinterpret_cast<layout::Word*>(peers[rank] + buffer.block.header(parity, buffer.rank)),
        layout::make_word(epoch, header));
  }
}

__device__ bool may_enter(const BufferView& buffer, layout::Epoch epoch) {  // rule 1
  bool ok = true;
  for (int rank = static_cast<int>(threadIdx.x); ok && rank < buffer.num_ranks;
       rank += kNumThreads) {
    ok = wait_for_completed(buffer, kOperation, epoch, epoch - 2, Phase::kEnter, rank);
  }
  return ok;
}

// The handle's dispatch is the one that this half holds; else, reported, there is nothing to send.
__device__ bool is_fresh(const CombineParams& p, layout::Epoch epoch, bool reports) {
  const HalfState& half = p.buffer.state->half[p.half];
  if (half.dispatch_id != p.dispatch_id) {
    if (reports) {
      report(p.buffer, kOperation, epoch,
             {ErrorCode::kStaleHandle, Phase::kNone, -1, static_cast<std::int64_t>(p.dispatch_id),
              static_cast<std::int64_t>(half.dispatch_id), 0, 0},
             false);
    }
    return false;
  }
  return half.has_rows != 0;
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&values)[16 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  } else {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}

template <typename T>
__device__ void gather(const CombineParams& p, const CombineShared& s, bool has_rows) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row_bytes = p.hidden * static_cast<int>(sizeof(T));
  const int chunks_per_row = (row_bytes + 511) / 512;
  const auto pitch = static_cast<std::int64_t>(layout::round_up(row_bytes, layout::kRowAlignment));
  const std::int64_t num_units = std::int64_t{p.num_tokens} * chunks_per_row;
  const Route* routes = p.buffer.arrays[p.half].routes;

  for (std::int64_t unit = std::int64_t{warp} * gridDim.x + blockIdx.x; unit < num_units;
       unit += std::int64_t{gridDim.x} * kNumWarps) {
    const std::int64_t token = unit / chunks_per_row;
    const int at = (static_cast<int>(unit - token * chunks_per_row) * 32 + lane) * 16;
    const bool inside = at < row_bytes;
    float sums[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = 0.0F;

    for (int first_k = 0; first_k < p.topk; first_k += 32) {
      Route route = kNoRoute;
      float weight = 0.0F;
      if (has_rows && first_k + lane < p.topk) {
        route = routes[token * p.topk + first_k + lane];
        weight = p.weights[token * p.topk + first_k + lane];
      }
      const std::byte* row = nullptr;
      if (route >= 0) {
        row = s.row_bases[route >> kRouteOwnerShift] +
              (route & ((Route{1} << kRouteOwnerShift) - 1)) * pitch;
      }
      const std::uint32_t selected = __ballot_sync(0xffffffffU, route >= 0);
      for (int k = 0; k < min(32, p.topk - first_k); k += kUnroll) {
        uint4 pieces[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          const auto* source = reinterpret_cast<const std::byte*>(__shfl_sync(
              0xffffffffU, reinterpret_cast<unsigned long long>(row), k + j));
          if (((selected >> (k + j)) & 1U) != 0 && inside) {
            pieces[j] = ptx::load_once(source + at);
          }
        }
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          const float scale = __shfl_sync(0xffffffffU, weight, k + j);
          if (((selected >> (k + j)) & 1U) != 0) {
            float values[kVector];
            unpack<T>(pieces[j], values);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              sums[i] = __fadd_rn(sums[i], __fmul_rn(scale, values[i]));
            }
          }
        }
      }
    }
    if (!inside) continue;
    const uint4 result = pack<T>(sums);
    std::byte* out = p.out + token * p.out_pitch + at;
    if (p.out_aligned != 0 && at + 16 <= row_bytes) {
      ptx::store_once(out, result);
    } else {
      const T* elements = reinterpret_cast<const T*>(&result);
      for (int i = 0; i < kVector && at + i * static_cast<int>(sizeof(T)) < row_bytes; ++i) {
        reinterpret_cast<T*>(out)[i] = elements[i];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads, 2)
    combine_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const CombineShared s(storage, buffer.num_ranks);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  for (int rank = thread; rank < buffer.num_ranks; rank += kNumThreads) {
    s.peers[rank] = buffer.blocks[rank];
  }
  ptx::wait_for_earlier_grids();
  ptx::let_next_grid_start();
  stamp(buffer, 16);
  if (thread == 0) {
    *s.start = p.sends != 0
                   ? take_start(&state.send, p.receives != 0 ? &state.receive : nullptr)
                   : take_start(&state.receive, nullptr);
  }
  const bool failed_before = ptx::load_relaxed(&state.failed) != 0;
  if (thread < buffer.num_ranks) ptx::fence(buffer.across_devices != 0);  // for publish_ready
  if (__syncthreads_or(static_cast<int>(failed_before)) != 0) return;
  const layout::Epoch epoch = s.start->epoch;
  const bool leads = s.start->ticket == 0;
  stamp(buffer, 17);

  const bool has_rows = is_fresh(p, epoch, leads && thread == 0);
  if (p.sends != 0 && leads) {
    const bool entered = may_enter(buffer, epoch);
    if (__syncthreads_or(static_cast<int>(!entered)) != 0) return;
    publish_ready(p, epoch, s.peers);
    if (thread == 0) state.half[p.half].combine_epoch = epoch;
  }
  if (p.receives == 0) return;
  stamp(buffer, 18);

  // A block with tokens needs `ready` from their owners; it asks all ranks, and so finds out if one
  // of them calls something else.
  const bool has_units =
      std::int64_t{blockIdx.x} <
      std::int64_t{p.num_tokens} *
          ((p.hidden * static_cast<int>(sizeof(T)) + 511) / 512);
  bool ok = true;
  if (has_units && has_rows) {
    const Arguments arguments = arguments_of(p);
    for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
      layout::Word word;
      ok = wait_for_epoch(buffer, kOperation, epoch,
                          buffer.block.header(layout::parity(epoch), rank), Phase::kReady, rank,
                          &word) &&
           check_header(buffer, kOperation, epoch, rank, layout::value_of(word),
                        layout::hash_arguments(arguments.values), arguments.values);
      s.row_bases[rank] =
          s.peers[rank] +
          buffer.block.combine_rows(layout::decode_header(layout::value_of(word)).half);
      ptx::fence(buffer.across_devices != 0);  // acquire: pairs with the fence of publish_ready
    }
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;
  stamp(buffer, 19);
  gather<T>(p, s, has_rows);
  __syncthreads();
  stamp(buffer, 20);
  if (thread == 0) *s.flag = static_cast<int>(is_last_done(state));
  __syncthreads();
  if (*s.flag == 0) return;
  for (int rank = thread; rank < buffer.num_ranks; rank += kNumThreads) {
    ptx::store_relaxed(
        reinterpret_cast<layout::Word*>(s.peers[rank] + buffer.block.completed(buffer.rank)),
        layout::make_word(epoch, 0));
  }
  stamp(buffer, 21);
}

// Copies the valid rows of y into the combine region, then publishes `ready`.
struct StageShared {
  RunTile tile;
  Start* start;
  int* flag;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE explicit StageShared(std::byte* storage)
      : StageShared(SharedCarver(storage)) {}
  TANDEM_HOST_DEVICE explicit StageShared(SharedCarver carver) : tile(carver) {
    start = carver.take<Start>(1);
    flag = carver.take<int>(1);
    size_bytes = carver.used();
  }
};

__global__ void __launch_bounds__(kNumThreads, 2)
    combine_stage_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const StageShared s(storage);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  ptx::wait_for_earlier_grids();
  ptx::let_next_grid_start();
  if (thread == 0) *s.start = take_start(&state.send, nullptr);
  const bool failed_before = ptx::load_relaxed(&state.failed) != 0;
  if (__syncthreads_or(static_cast<int>(failed_before)) != 0) return;
  const layout::Epoch epoch = s.start->epoch;
  bool ok = may_enter(buffer, epoch);
  for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
    ok = wait_for_completed(buffer, kOperation, epoch, state.half[p.half].combine_epoch,
                            Phase::kCombineHalf, rank);  // rule 2
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;

  const bool has_rows = is_fresh(p, epoch, s.start->ticket == 0 && thread == 0);
  const int first = buffer.first_of_rank[buffer.rank];
  const int num_local = has_rows ? buffer.first_of_rank[buffer.rank + 1] - first : 0;
  const BufferView::Arrays& arrays = buffer.arrays[p.half];
  const int row_bytes = p.hidden * p.element_bytes;
  const std::int64_t pitch = layout::round_up(row_bytes, layout::kRowAlignment);
  const int chunks_per_row = (row_bytes + kCopyChunk - 1) / kCopyChunk;
  std::byte* region = buffer.blocks[buffer.rank] + buffer.block.combine_rows(p.half);
  for (int tile_begin = 0; tile_begin < num_local; tile_begin += kRunsPerTile) {
    const int runs = min(kRunsPerTile, num_local - tile_begin);
    std::uint32_t count = 0;
    if (thread < runs) {
      count = static_cast<std::uint32_t>(arrays.counts[tile_begin + thread]);
      s.tile.source[thread] = arrays.offsets[tile_begin + thread];
    }
    block_scan(
        runs, s.tile.warp_sums, [&](int) { return count; },
        [&](int i, std::uint32_t sum) { s.tile.first[i] = sum; });
    for_each_chunk(s.tile, runs, chunks_per_row, [&](int run, std::uint32_t row, int chunk) {
      const std::int64_t index = s.tile.source[run] + row;
      const int offset = chunk * kCopyChunk;
      copy_chunk(region + index * pitch + offset, p.y + index * p.y_pitch + offset,
                 min(kCopyChunk, row_bytes - offset), p.y_aligned != 0, p.element_bytes);
    });
    __syncthreads();
  }
  __syncthreads();
  if (thread == 0) *s.flag = static_cast<int>(is_last_done(state));
  __syncthreads();
  if (*s.flag == 0) return;
  ptx::fence(buffer.across_devices != 0);
  publish_ready(p, epoch, buffer.blocks);
  if (thread == 0) state.half[p.half].combine_epoch = epoch;
}

// Rule 2 for a half that a combine has used since its dispatch ended (which waits for it
// otherwise): what is queued behind this kernel may write to the combine region.
__global__ void __launch_bounds__(kNumThreads, 2)
    combine_acquire_kernel(const __grid_constant__ CombineParams p) {
  const BufferView& buffer = p.buffer;
  ptx::wait_for_earlier_grids();
  ptx::let_next_grid_start();
  if (ptx::load_relaxed(&buffer.state->failed) != 0) return;
  const layout::Epoch wanted = buffer.state->half[p.half].combine_epoch;
  const auto next = static_cast<layout::Epoch>(ptx::load_relaxed(&buffer.state->send) >> 32);
  bool ok = true;
  for (int rank = static_cast<int>(threadIdx.x); ok && rank < buffer.num_ranks;
       rank += kNumThreads) {
    ok = wait_for_completed(buffer, kOperation, next, wanted, Phase::kCombineHalf, rank);
  }
}

}  // namespace

const void* acquire_kernel() { return reinterpret_cast<const void*>(&combine_acquire_kernel); }

const void* combine_kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return reinterpret_cast<const void*>(&combine_kernel<__nv_bfloat16>);
    case DType::kFloat16:
      return reinterpret_cast<const void*>(&combine_kernel<__half>);
    default:
      return reinterpret_cast<const void*>(&combine_kernel<float>);
  }
}

const void* stage_kernel() { return reinterpret_cast<const void*>(&combine_stage_kernel); }

std::int64_t combine_shared_bytes(int num_ranks) {
  return CombineShared(nullptr, num_ranks).size_bytes;
}

std::int64_t stage_shared_bytes() {
  return StageShared(static_cast<std::byte*>(nullptr)).size_bytes;
}

}  // namespace tandem::cuda
