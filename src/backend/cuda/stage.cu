// A combine of a caller's tensor: the kernel that copies its rows into the combine region first.
// And the one that makes sure of that region for a caller who writes to it.
#include "backend/cuda/combine_shared.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/row_copy.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kCombine;

// Copies the valid rows of y into the combine region, then publishes `ready`.
struct StageShared {
  RunTile tile;
  std::byte** peers;  // [R]
  HalfState* half;
  layout::Epoch* epoch;
  int* flag;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE StageShared(std::byte* storage, int num_ranks)
      : StageShared(SharedCarver(storage), num_ranks) {}
  TANDEM_HOST_DEVICE StageShared(SharedCarver carver, int num_ranks) : tile(carver) {
    peers = carver.take<std::byte*>(num_ranks);
    half = carver.take<HalfState>(1);
    epoch = carver.take<layout::Epoch>(1);
    flag = carver.take<int>(1);
    size_bytes = carver.used();
  }
};

template <Variant kVariant>
__global__ void __launch_bounds__(kNumThreads, 1)
    combine_stage_kernel(const __grid_constant__ CombineParams p) {
  constexpr bool kElsewhere = has_elsewhere(kVariant);
  constexpr bool kWatched = has_watch(kVariant);
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const StageShared s(storage, buffer.num_ranks);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  ptx::wait_for_earlier_grids();
  const AtWork<kWatched> at_work(buffer);
  const FirstLook<kWatched> first_look(buffer, own);
  if (thread == 0) {
    *s.epoch = ptx::load_relaxed(&state.send.epoch);
    *s.half = state.half[p.half];
  }
  const bool special = __syncthreads_or(static_cast<int>(first_look.is_special(buffer))) != 0;
  const layout::Epoch epoch = *s.epoch;
  if (special && !strike_absent(buffer, kOperation, epoch, false, s.peers)) return;
  const HalfState half = *s.half;
  bool ok = true;
#pragma unroll 1
  for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
    ok = wait_for_completed(buffer, {kOperation, epoch, Phase::kCombineHalf, rank}, own,
                            half.combine_epoch) &&  // rule 2
         wait_for_completed(buffer, {kOperation, epoch, Phase::kEnter, rank}, own, epoch - 2);
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;
  ptx::let_next_grid_start();  // this one waits for nobody from here on

  const bool has_rows = is_fresh(p, half, epoch, blockIdx.x == 0 && thread == 0);
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
  if (thread < 32) {
    ptx::fence(buffer.across_devices != 0);
    publish_ready<kElsewhere>(p, half, arguments_of(p, half), epoch, s.peers);
  }
  if (thread == 0) {
    state.half[p.half].combine_epoch = epoch;
    move_on(state, epoch, true, false);
  }
}

// Rule 2 for a half that a combine has used since its dispatch ended (which waits for it
// otherwise): what is queued behind this kernel may write to the combine region.
__global__ void __launch_bounds__(kNumThreads, 1)
    combine_acquire_kernel(const __grid_constant__ CombineParams p) {
  const BufferView& buffer = p.buffer;
  ptx::wait_for_earlier_grids();
  if (is_halted(buffer, buffer.blocks[buffer.rank])) return;
  const layout::Epoch wanted = buffer.state->half[p.half].combine_epoch;
  const auto next = ptx::load_relaxed(&buffer.state->send.epoch);
  bool ok = true;
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); ok && rank < buffer.num_ranks;
       rank += kNumThreads) {
    ok = wait_for_completed(buffer, {kOperation, next, Phase::kCombineHalf, rank},
                            buffer.blocks[buffer.rank], wanted);
  }
}

}  // namespace

const void* acquire_kernel() { return reinterpret_cast<const void*>(&combine_acquire_kernel); }

const void* stage_kernel(Variant variant) {
  return pick(variant, &combine_stage_kernel<Variant::kPlain>,
              &combine_stage_kernel<Variant::kElsewhere>, &combine_stage_kernel<Variant::kWatched>,
              &combine_stage_kernel<Variant::kWatchedElsewhere>);
}

std::int64_t stage_shared_bytes(int num_ranks) {
  return StageShared(nowhere(), num_ranks).size_bytes;
}

}  // namespace tandem::cuda
