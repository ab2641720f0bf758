// The receive phase of a slotted dispatch: waits for counts and rows of all ranks, copies rows from
// the landing region into the caller's tensor in their final order, and turns slots into routes.
#include "backend/cuda/dispatch_shared.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/outbox.cuh"
#include "backend/cuda/row_copy.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kDispatch;

struct ReceiveShared {
  RunTile tile;
  std::byte** peers;
  Start* start;
  int* flag;
  std::uint32_t* scan;     // [E + 1]
  std::uint32_t* segment;  // [R]: rows of lower-numbered sources, in the tiles' order
  RoutingTables tables;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE ReceiveShared(std::byte* storage, int num_ranks, int num_experts)
      : ReceiveShared(SharedCarver(storage), num_ranks, num_experts) {}

 private:
  TANDEM_HOST_DEVICE ReceiveShared(SharedCarver carver, int num_ranks, int num_experts)
      : tile(carver),
        peers(carver.take<std::byte*>(num_ranks)),
        start(carver.take<Start>(1)),
        flag(carver.take<int>(1)),
        scan(carver.take<std::uint32_t>(num_experts + 1)),
        segment(carver.take<std::uint32_t>(num_ranks)),
        tables(carver, num_ranks, num_experts),
        size_bytes(carver.used()) {}
};

template <Variant kVariant>
__global__ void __launch_bounds__(kNumThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kElsewhere = has_elsewhere(kVariant);
  constexpr bool kWatched = has_watch(kVariant);
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const ReceiveShared s(storage, buffer.num_ranks, buffer.num_experts);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  load_tables(buffer, s.tables);
#pragma unroll 1
  for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
    s.tables.all[expert] = 0;
    s.tables.base[expert] = 0;
  }
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  ptx::wait_for_earlier_grids();
  const AtWork<kWatched> at_work(buffer);
  const FirstLook<kWatched> first_look(buffer, own);
  if (thread == 0) {
    *s.start = {ptx::load_relaxed(&state.receive.epoch), take_ticket(state.receive)};
  }
  const bool special = __syncthreads_or(static_cast<int>(first_look.is_special(buffer))) != 0;
  const layout::Epoch epoch = s.start->epoch;
  if (special && !strike_absent(buffer, kOperation, epoch, false, s.peers)) return;
  const int parity = layout::parity(epoch);
  stamp(buffer, 9);

  bool ok = true;
#pragma unroll 1
  for (;;) {
    ok = read_counts(p, s.tables, epoch, s.peers, nullptr);
    if (__syncthreads_or(static_cast<int>(!ok)) == 0) break;
    if (!kWatched ||
        !count_without_lost(buffer, epoch, p.half, s.peers, s.tables.all, s.tables.base)) {
      return;
    }
  }
  stamp(buffer, 10);

  // Rows that do not fit at a receiver, or, because tokens name an expert twice, into a source's
  // part of a landing region: a warp looks at a (source, owner).
  bool overflow = add_starts(p, epoch, s.tables, s.scan);
  Excess excess;
#pragma unroll 1
  for (int pair = thread / 32; pair < buffer.num_ranks * buffer.num_ranks; pair += kNumWarps) {
    const int source = pair / buffer.num_ranks;
    const int owner = pair - source * buffer.num_ranks;
    std::uint32_t rows = 0;
#pragma unroll 2
    for (int i = s.tables.first_of_rank[owner] + thread % 32; i < s.tables.first_of_rank[owner + 1];
         i += 32) {
      rows += count_of(buffer, own, epoch, source, s.tables.by_rank[i]);
    }
    rows = __reduce_add_sync(0xffffffffU, rows);
    const std::int64_t limit = rows_per_source(p, s.tables, owner);
    if (rows > limit) excess = {rows, limit, kExcessOfSource, source, owner};
  }
  overflow = any_excess(buffer, epoch, excess) || overflow;

#pragma unroll 1
  while (!overflow) {
    ok = wait_for_rows(buffer, epoch, s.tables.num_words);
    if (__syncthreads_or(static_cast<int>(!ok)) == 0) break;
    if (!kWatched || !go_on_without_rows(p, epoch, s.scan, overflow, s.tables.num_words)) return;
  }
  stamp(buffer, 11);

  // Slots of this rank's own entries become routes.
  Route* routes = buffer.arrays[p.half].routes;
  const int num_entries = p.num_tokens * p.topk;
  for (int i = static_cast<int>(blockIdx.x) * kNumThreads + thread; i < num_entries;
       i += static_cast<int>(gridDim.x) * kNumThreads) {
    const Route route = routes[i];
    if (route < 0) continue;
    const auto expert = static_cast<int>(route >> kRouteOwnerShift);
    const Route slot = route & ((Route{1} << kRouteOwnerShift) - 1);
    const int owner = owner_of(s.tables.map[expert]);
    // To another host: what comes back lies as it was sent, and its place is known since then.
    const std::int64_t begin =
        is_elsewhere<kElsewhere>(buffer, s.peers[owner]) ? 0 : s.tables.base[expert];
    routes[i] =
        overflow ? kNoRoute : ((static_cast<Route>(owner) << kRouteOwnerShift) | (begin + slot));
  }

  // Runs of rows: one for each (source, local expert), sources first, as they lie in the landing
  // region.
  const int first = s.tables.first_of_rank[buffer.rank];
  const int num_local = s.tables.first_of_rank[buffer.rank + 1] - first;
  const int num_runs = overflow ? 0 : buffer.num_ranks * num_local;
  const std::int64_t rows_per_expert = std::int64_t{buffer.num_ranks} * p.max_tokens;
  const int value_bytes = static_cast<int>(p.row.value_bytes());
  const int scale_bytes = 4 * p.row.num_scales();
  const int chunks_per_row = (value_bytes + kCopyChunk - 1) / kCopyChunk;
  const std::byte* landing = own + buffer.block.landing_rows(parity);
  const auto* landing_sources =
      reinterpret_cast<const std::int32_t*>(own + buffer.block.landing_sources(parity));
  std::int32_t* source_tokens = buffer.arrays[p.half].source_tokens;
  std::uint32_t carry = 0;  // rows of earlier tiles
  for (int tile_begin = 0; tile_begin < num_runs; tile_begin += kRunsPerTile) {
    const int runs = min(kRunsPerTile, num_runs - tile_begin);
    std::uint32_t count = 0;
    const int source = (tile_begin + thread) / num_local;
    const int local = (tile_begin + thread) - source * num_local;
    if (thread < runs) {
      const int expert = s.tables.by_rank[first + local];
      std::uint32_t lower = 0;
      for (int rank = 0; rank < source; ++rank) {
        lower += count_of(buffer, own, epoch, rank, expert);
      }
      count = count_of(buffer, own, epoch, source, expert);
      const std::int64_t start =
          p.padded != 0 ? local * rows_per_expert : s.scan[first + local] - s.scan[first];
      s.tile.destination[thread] = start + lower;
    }
    block_scan(
        runs, s.tile.warp_sums, [&](int) { return count; },
        [&](int i, std::uint32_t sum) { s.tile.first[i] = sum; });
    if (thread < runs && local == 0) s.segment[source] = carry + s.tile.first[thread];
    __syncthreads();
    if (thread < runs) {
      s.tile.source[thread] = source * rows_per_source(p, s.tables, buffer.rank) +
                              (carry + s.tile.first[thread] - s.segment[source]);
    }
    __syncthreads();
    for_each_chunk(s.tile, runs, chunks_per_row, [&](int run, std::uint32_t row, int chunk) {
      const std::int64_t from = s.tile.source[run] + row;
      const std::int64_t to = s.tile.destination[run] + row;
      const std::byte* source_row = landing + from * p.pitch;
      const int offset = chunk * kCopyChunk;
      copy_chunk(p.recv_x + to * value_bytes + offset, source_row + offset,
                 min(kCopyChunk, value_bytes - offset), p.recv_aligned != 0,
                 size_of(value_dtype(p.row.format)));
      if (chunk == 0) {
        const int lane = thread % 32;
        if (lane == 0) source_tokens[to] = landing_sources[from];
        if (scale_bytes != 0) {
          copy_chunk(p.recv_scales + to * scale_bytes, source_row + p.row.scales_offset(),
                     scale_bytes, false, 4);
        }
      }
    });
    carry += s.tile.first[runs];
    __syncthreads();
  }
  __syncthreads();
  stamp(buffer, 12);

  if (thread == 0) *s.flag = static_cast<int>(is_last_done(state));
  if (s.start->ticket == min(1U, gridDim.x - 1)) {
    write_handle_arrays<kElsewhere>(p, epoch, s.tables, s.scan, overflow);
  }
  __syncthreads();
  if (*s.flag == 0) return;
  for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
    ok = wait_for_completed(buffer, {kOperation, epoch, Phase::kCombineHalf, rank},
                            buffer.blocks[buffer.rank],
                            state.half[p.half].combine_epoch);  // rule 2, as in dispatch_kernel
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;
  ptx::let_next_grid_start();
  if (thread == 0) {
    state.half[p.half].has_rows = overflow ? 0 : 1;
    move_on(state, epoch, false, true);
  }
  publish_completed(buffer, epoch, s.peers, kNumThreads);
  if (thread == 0) post_completed<kElsewhere>(buffer, kOperation, p.half, epoch);
  stamp(buffer, 13);
}

}  // namespace

const void* receive_kernel(Variant variant) {
  return pick(variant, &dispatch_receive_kernel<Variant::kPlain>,
              &dispatch_receive_kernel<Variant::kElsewhere>,
              &dispatch_receive_kernel<Variant::kWatched>,
              &dispatch_receive_kernel<Variant::kWatchedElsewhere>);
}

std::int64_t receive_shared_bytes(int num_ranks, int num_experts) {
  return ReceiveShared(nowhere(), num_ranks, num_experts).size_bytes;
}

}  // namespace tandem::cuda
