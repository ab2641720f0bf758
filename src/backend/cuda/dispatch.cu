// Dispatch: one kernel for packed placement, and the send phase of slotted placement.
//
// Blocks never wait for one another. The block that starts first publishes header and counts before
// it waits for anything; every block works out by itself the slots of the entries it sends and, for
// packed placement, the first rows from the counts of all ranks. Each block tells every peer on its
// own that its rows have arrived. The block that is last to have read the control words waits for
// the peers' rows and ends the operation.
#include "backend/cuda/dispatch_shared.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/outbox.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kDispatch;
constexpr int kBatch = 4;  // entries that a thread loads before it knows the epoch

__device__ std::int64_t raw_index(const DispatchParams& p, int i) {
  return p.wide_indices != 0 ? static_cast<const std::int64_t*>(p.topk_idx)[i]
                             : static_cast<const std::int32_t*>(p.topk_idx)[i];
}

constexpr int kNoSuchExpert = -2;

// The expert that an entry's index stands for; -1 for none.
__device__ __forceinline__ int expert_of(const DispatchParams& p, std::int64_t index) {
  if (index < 0) return -1;
  return index < p.buffer.num_experts ? static_cast<int>(index) : kNoSuchExpert;
}

__device__ int load_expert(const DispatchParams& p, int i) { return expert_of(p, raw_index(p, i)); }

__device__ __noinline__ void report_index(const DispatchParams& p, int i) {
  report(p.buffer, kOperation, ptx::load_relaxed(&p.buffer.state->send.epoch),
         {ErrorCode::kInvalidArgument, Phase::kNone, -1, p.buffer.num_experts, raw_index(p, i),
          (std::int64_t{i / p.topk} << 32) | (i % p.topk), 0},
         false);
}

// Words that one rank tells another before any row: counts, number of arrival words, header, and
// the arguments behind the header's hash.
__device__ void publish(const DispatchParams& p, const DispatchShared& s, layout::Epoch epoch) {
  const BufferView& buffer = p.buffer;
  const int parity = layout::parity(epoch);
  const int num_words = buffer.num_experts + 2 + layout::kNumArguments;
  // A group of threads to every fourth rank, so that nothing has to be divided.
  constexpr int kGroup = kNumThreads / 4;
#pragma unroll 1
  for (int which = static_cast<int>(threadIdx.x) % kGroup; which < num_words; which += kGroup) {
    const int beyond = which - buffer.num_experts;
    std::int64_t offset = 0;
    std::uint32_t value = 0;
    if (beyond < 0) {
      offset = buffer.block.count(parity, buffer.rank, which);
      value = s.own[which];
    } else if (beyond == 0) {
      offset = buffer.block.arrived(parity, buffer.rank, kNumBlocksWord);
      value = gridDim.x;
    } else if (beyond == 1) {
      offset = buffer.block.header(parity, buffer.rank);
      value = layout::encode(layout::Header{kOperation, p.half, p.arguments_hash});
    } else {
      offset =
          buffer.block.argument(parity, buffer.rank, static_cast<layout::Argument>(beyond - 2));
      value = p.arguments[beyond - 2];
    }
    const layout::Word word = layout::make_word(epoch, value);
#pragma unroll 1
    for (int rank = static_cast<int>(threadIdx.x) / kGroup; rank < buffer.num_ranks; rank += 4) {
      if (s.peers[rank] == nullptr) continue;
      ptx::store_relaxed(reinterpret_cast<layout::Word*>(s.peers[rank] + offset), word);
    }
  }
}

// Where rows and source tokens for each rank begin: in the views of the halves that they use, or
// in their landing regions.
template <bool kElsewhere>
__device__ __forceinline__ void list_places(const DispatchParams& p, const DispatchShared& s,
                                            int parity) {
  const BufferView& buffer = p.buffer;
  // From the last thread on: the first ones have other things to do.
#pragma unroll 1
  for (int rank = kNumThreads - 1 - static_cast<int>(threadIdx.x); rank < buffer.num_ranks;
       rank += kNumThreads) {
    std::byte* const peer = s.peers[rank];
    if (peer == nullptr) continue;
    std::int64_t rows_at = 0;
    std::int64_t sources_at = 0;
    if (is_elsewhere<kElsewhere>(buffer, peer)) {
      rows_at = buffer.remote->layout.rows(parity);
      sources_at = buffer.remote->layout.sources(parity);
    } else if (p.slotted != 0) {
      rows_at = buffer.block.landing_rows(parity);
      sources_at = buffer.block.landing_sources(parity);
    } else {
      rows_at = buffer.block.view_rows(s.tables.halves[rank]);
      sources_at = buffer.block.view_sources(s.tables.halves[rank]);
    }
    s.row_bases[rank] = peer + rows_at;
    s.source_bases[rank] = reinterpret_cast<std::int32_t*>(peer + sources_at);
  }
}

// What selects experts of ranks that take no part counts for nothing. Returns as strike_absent
// does. Out of line, and so without the structures of shared memory, which would have to lie in
// memory themselves.
__device__ __noinline__ bool forget_absent(const BufferView& buffer, layout::Epoch epoch,
                                           bool failed, std::byte** peers, std::uint32_t* counts,
                                           const std::uint32_t* map) {
  if (!strike_absent(buffer, kOperation, epoch, failed, peers)) return false;
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < buffer.num_experts;
       expert += kNumThreads) {
    if (peers[owner_of(map[expert])] == nullptr) counts[expert] = 0;
  }
  __syncthreads();
  return true;
}

__device__ __forceinline__ std::uint32_t first_unit(const DispatchParams& p) {
  return blockIdx.x * p.units_per_block + min(blockIdx.x, p.blocks_with_one_more);
}

__device__ RowShare share_of(const DispatchParams& p) {
  const std::uint32_t begin = first_unit(p);
  const std::uint32_t end =
      begin + p.units_per_block + (blockIdx.x < p.blocks_with_one_more ? 1U : 0U);
  const std::uint32_t first_token = begin / p.units_per_row;
  return {.unit_begin = begin,
          .unit_end = end,
          .first_token = first_token,
          .last_token = end > begin ? (end - 1) / p.units_per_row + 1 : first_token,
          .tile_tokens = kTileEntries / static_cast<std::uint32_t>(p.topk)};
}

template <typename X, Variant kVariant>
__global__ void __launch_bounds__(kNumThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParams p) {
  constexpr bool kElsewhere = has_elsewhere(kVariant);
  constexpr bool kWatched = has_watch(kVariant);
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const DispatchShared s(storage, buffer.num_ranks, buffer.num_experts, kElsewhere);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  DeviceState& state = *buffer.state;

  RowRing<X> ring(p, s.rings + warp * kRingBytes, s.barriers + warp * kMaxStages,
                  s.scales + warp * 2 * kMaxGroupsPerChunk);
  ring.init();
  load_tables(buffer, s.tables);
#pragma unroll 1
  for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
    s.before[expert] = 0;
    s.own[expert] = 0;
    s.tables.all[expert] = 0;
    s.tables.base[expert] = 0;
  }
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  // Divisions take their time; what lies in shared memory is there before the wait, whatever the
  // compiler would like to put off.
  if (thread == 0) *s.share = share_of(p);
  if (thread < kNumWarps) s.cursors[thread] = UnitCursor(first_unit(p) + thread, p.units_per_row);
  const int num_entries = p.num_tokens * p.topk;
  __syncthreads();  // the tables are zero
  ptx::wait_for_earlier_grids();
  const AtWork<kWatched> at_work(buffer);
  stamp(buffer, 0);

  // Everything that depends on nothing else is asked for at once: ticket, rows, indices, words.
  // The words that all blocks read are read by few threads: L2 serves a line to one at a time.
  const bool checks_peers = thread < max(32, buffer.num_ranks);
  layout::Epoch epoch = 0;
  std::uint32_t own_ticket = 0;
  if (checks_peers) epoch = ptx::load_relaxed(&state.send.epoch);
  if (thread == 0) own_ticket = take_ticket(state.send);
  const FirstLook<kWatched> first_look(buffer, own);
  layout::Word completed = 0;
  if (thread < buffer.num_ranks) completed = load_word(own, buffer.block.completed(thread));
  if (thread == 64) *s.combine_epoch = state.half[p.half].combine_epoch;
  std::int64_t indices[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = thread + j * kNumThreads;
    indices[j] = ptx::load_index_if(p.topk_idx, i, p.wide_indices != 0, i < num_entries);
  }
  const auto [unit_begin, unit_end, first_token, last_token, tile_tokens] = *s.share;
  const std::uint32_t units_per_row = p.units_per_row;
  ring.begin(s.cursors[warp], unit_end);
  stamp(buffer, 1);

  // Histogram of this rank's entries: all of them, and those before this block's.
  int tile_begin = static_cast<int>(first_token) * p.topk;
  int tile_end = static_cast<int>(min(last_token, first_token + tile_tokens)) * p.topk;
  bool ok = true;
#pragma unroll 1
  for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
    if (rank < kNumThreads && layout::has_reached(layout::epoch_of(completed), epoch - 2)) continue;
    ok = wait_for_completed(buffer, {kOperation, epoch, Phase::kEnter, rank}, own,
                            epoch - 2);  // rule 1
  }
  const auto count_entry = [&](int i, int expert) {
    if (i >= tile_begin && i < tile_end) {
      s.entries[i - tile_begin].slot.expert = expert;
      if (expert == kNoSuchExpert) report_index(p, i);
    }
    if (expert < 0) return;
    atomicAdd(&s.own[expert], 1U);
    if (i < tile_begin) atomicAdd(&s.before[expert], 1U);
  };
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int i = thread + j * kNumThreads;
    if (i < num_entries) count_entry(i, expert_of(p, indices[j]));
  }
#pragma unroll 1
  for (int i = thread + kBatch * kNumThreads; i < num_entries; i += kNumThreads) {
    count_entry(i, load_expert(p, i));
  }
  if (thread == 0) *s.start = {epoch, own_ticket};
  bool special = __syncthreads_or(static_cast<int>(!ok || first_look.is_special(buffer))) != 0;
  epoch = s.start->epoch;
  if (special && !forget_absent(buffer, epoch, !ok, s.peers, s.own, s.tables.map)) {
    ring.finish();
    return;
  }
  const std::uint32_t ticket = s.start->ticket;
  const int parity = layout::parity(epoch);
  if (ticket == 0) {
    publish(p, s, epoch);
    if (thread == 0) {
      state.half[p.half].dispatch_id = p.id;
      state.half[p.half].dispatch_epoch = epoch;
      state.half[p.half].has_rows = 0;
    }
    post_header<kElsewhere>(p, epoch);
  }
  if (ticket == gridDim.x - 1 && p.slotted == 0) publish_started(buffer, epoch, s.peers);
  ring.prefetch();
  stamp(buffer, 2);

  // Slots: entries before the tile, and earlier ones in it, with the same expert.
  const auto find_slots = [&](int num) {
#pragma unroll 1
    for (int i = thread; i < num; i += kNumThreads) {
      const int expert = s.entries[i].slot.expert;
      s.owners[i] = static_cast<std::int16_t>(expert < 0 ? -1 : owner_of(s.tables.map[expert]));
      if (expert < 0) continue;
      std::uint32_t slot = s.before[expert];
      for (int j = 0; j < i; ++j) slot += s.entries[j].slot.expert == expert ? 1U : 0U;
      s.entries[i].slot.slot = slot;
    }
  };
  find_slots(tile_end - tile_begin);

  bool overflow = false;
  std::uint32_t* scan = p.slotted != 0 ? s.tables.all : s.own;
  if (p.slotted != 0) {
    list_places<kElsewhere>(p, s, parity);
    scan_starts(s.own, 1, buffer.num_experts, s.tables, scan);
#pragma unroll 1
    for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
      const int first = s.tables.first_of_rank[owner_of(s.tables.map[expert])];
      s.tables.base[expert] = scan[first + local_of(s.tables.map[expert])] - scan[first];
    }
    __syncthreads();
  } else {
    if constexpr (kElsewhere) {
      scan_starts(s.own, 1, buffer.num_experts, s.tables, s.starts);
    }
    const auto have_failed = [&] {
      const bool counts_ok = read_counts(p, s.tables, epoch, s.peers, s.own);
      return __syncthreads_or(static_cast<int>(!counts_ok)) != 0;
    };
    bool failed = have_failed();
    if constexpr (kWatched) {
#pragma unroll 1
      while (failed &&
             count_without_lost(buffer, epoch, p.half, s.peers, s.tables.all, s.tables.base)) {
        special = true;
        failed = have_failed();
      }
    }
    if (failed) {
      ring.finish();
      return;
    }
    stamp(buffer, 3);
    list_places<kElsewhere>(p, s, parity);
    overflow = add_starts(p, epoch, s.tables, scan);
  }
  if (ticket == 0) write_first_rows<kElsewhere>(p, s.tables, epoch);
  stamp(buffer, 4);

  // Tile by tile: entries become addresses, rows go out.
  Route* routes = buffer.arrays[p.half].routes;
#pragma unroll 1
  for (std::uint32_t tile_token = first_token; tile_token < last_token;) {
    const int num = tile_end - tile_begin;
#pragma unroll 1
    for (int i = thread; i < num; i += kNumThreads) {
      const int owner = s.owners[i];
      const std::uint32_t token =
          tile_token + ((static_cast<std::uint32_t>(i) * p.topk_reciprocal) >> 20);
      const bool begins_here = token * units_per_row >= unit_begin;  // the row, in this block
      const bool is_absent = special && owner >= 0 && s.peers[owner] == nullptr;
      Route route = kNoRoute;
      std::byte* destination = nullptr;
      if (owner >= 0 && !is_absent && !overflow) {
        const int expert = s.entries[i].slot.expert;
        const std::int64_t slot = s.entries[i].slot.slot;
        std::int64_t row = std::int64_t{s.tables.base[expert]} + slot;
        bool fits = true;
        if (p.slotted != 0) {
          const std::int64_t limit = rows_per_source(p, s.tables, owner);
          fits = row < limit;  // else all ranks see in the counts that it does not
          row += buffer.rank * limit;
          route = (static_cast<Route>(expert) << kRouteOwnerShift) | slot;
        } else {
          route = (static_cast<Route>(owner) << kRouteOwnerShift) | row;
        }
        if (is_elsewhere<kElsewhere>(buffer, s.peers[owner])) {
          row = row_sent(s.tables, p.slotted != 0 ? scan : s.starts, expert, slot);
          // The send phase of slotted placement leaves what its receive phase makes of it.
          route = (static_cast<Route>(p.slotted != 0 ? expert : owner) << kRouteOwnerShift) | row;
        }
        if (fits) {
          destination = s.row_bases[owner] + row * p.pitch;
          if (begins_here) s.source_bases[owner][row] = static_cast<std::int32_t>(token);
        }
      }
      if (begins_here) routes[tile_begin + i] = route;
      s.entries[i].destination = destination;
    }
    __syncthreads();
    const std::uint32_t next_token = min(last_token, tile_token + tile_tokens);
    ring.send(min(unit_end, next_token * units_per_row), tile_token,
              reinterpret_cast<std::byte* const*>(s.entries));
    tile_token = next_token;
    if (tile_token >= last_token) break;
    __syncthreads();
    for (int i = tile_begin + thread; i < tile_end; i += kNumThreads) {
      const int expert = load_expert(p, i);
      if (expert >= 0) atomicAdd(&s.before[expert], 1U);
    }
    tile_begin = tile_end;
    tile_end = static_cast<int>(min(last_token, tile_token + tile_tokens)) * p.topk;
    for (int i = tile_begin + thread; i < tile_end; i += kNumThreads) {
      s.entries[i - tile_begin].slot.expert = load_expert(p, i);
    }
    __syncthreads();
    find_slots(tile_end - tile_begin);
    __syncthreads();
  }
  stamp(buffer, 5);
  // The next kernel may take its place once no peer's blocks look for theirs; a send phase waits
  // for nobody from here on.
  const bool lets_next_start =
      p.slotted != 0 || (warp == 0 && all_started(buffer, epoch, own, s.peers));
  if (lets_next_start) ptx::let_next_grid_start();
  ring.finish();
  __syncthreads();
  if (thread == 0) post_rows<kElsewhere>(p, epoch, !overflow);
  stamp(buffer, 6);
  // Arrived: release, pairs with the fence in wait_for_rows. The barrier has gathered the rows of
  // all threads of this block.
#pragma unroll 1
  for (int rank = thread; rank < buffer.num_ranks; rank += kNumThreads) {
    if (s.peers[rank] == nullptr) continue;
    ptx::fence(buffer.across_devices != 0);
    ptx::store_relaxed(
        reinterpret_cast<layout::Word*>(
            s.peers[rank] + buffer.block.arrived(parity, buffer.rank,
                                                 kFirstBlockWord + static_cast<int>(blockIdx.x))),
        layout::make_word(epoch, 0));
  }
  stamp(buffer, 7);
  // Asked by a warp that tells nobody of rows: the answer comes while the peers' words do.
  constexpr int kCountingThread = kNumThreads - 32;
  if (thread == kCountingThread) {
    const bool last = is_last_done(state);
    *s.flag = static_cast<int>(last);
    if (p.slotted != 0 && last) move_on(state, epoch, true, false);
  }
  if (p.slotted != 0) return;

  // One block writes what the caller gets beside the rows; it is rarely the one that ends the
  // operation.
  if (ticket == min(1U, gridDim.x - 1)) {
    write_handle_arrays<kElsewhere>(p, epoch, s.tables, scan, overflow);
  }
  __syncthreads();
  if (*s.flag == 0) return;
  if (warp == 0 && !lets_next_start && all_started(buffer, epoch, own, s.peers)) {
    ptx::let_next_grid_start();
  }
  ok = wait_for_rows(buffer, epoch, s.tables.num_words);
  if constexpr (kWatched) {
#pragma unroll 1
    while (__syncthreads_or(static_cast<int>(!ok)) != 0) {
      if (!go_on_without_rows(p, epoch, scan, overflow, s.tables.num_words)) return;
      ok = wait_for_rows(buffer, epoch, s.tables.num_words);
    }
  }
  // Rule 2 for the combine region that goes with this half: next_combine_buffer hands it out next.
#pragma unroll 1
  for (int rank = thread; ok && rank < buffer.num_ranks; rank += kNumThreads) {
    if (rank < kNumThreads && layout::has_reached(layout::epoch_of(completed), *s.combine_epoch)) {
      continue;
    }
    ok = wait_for_completed(buffer, {kOperation, epoch, Phase::kCombineHalf, rank}, own,
                            *s.combine_epoch);
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;
  if (thread == 0) {
    state.half[p.half].has_rows = overflow ? 0 : 1;
    move_on(state, epoch, true, true);
  }
  publish_completed(buffer, epoch, s.peers, kNumThreads);
  if (thread == 0) post_completed<kElsewhere>(buffer, kOperation, p.half, epoch);
  stamp(buffer, 8);
}

template <typename X>
const void* any(Variant variant) {
  return pick(variant, &dispatch_kernel<X, Variant::kPlain>,
              &dispatch_kernel<X, Variant::kElsewhere>, &dispatch_kernel<X, Variant::kWatched>,
              &dispatch_kernel<X, Variant::kWatchedElsewhere>);
}

}  // namespace

std::int64_t dispatch_shared_bytes(int num_ranks, int num_experts, bool elsewhere) {
  return DispatchShared(nowhere(), num_ranks, num_experts, elsewhere).size_bytes;
}

const void* dispatch_kernel_for(Format format, DType x_dtype, Variant variant) {
  if (!is_fp8(format)) return any<void>(variant);
  switch (x_dtype) {
    case DType::kBFloat16:
      return any<__nv_bfloat16>(variant);
    case DType::kFloat16:
      return any<__half>(variant);
    default:
      return any<float>(variant);
  }
}

}  // namespace tandem::cuda
