// Shared memory of a block of the dispatch kernels.
#pragma once

#include "backend/cuda/block_tools.cuh"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/roster.cuh"
#include "backend/cuda/row_ring.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {

// An entry (token, k) of the tile at hand, on its way to the address of its row.
union Entry {
  struct {
    std::int32_t expert;
    std::uint32_t slot;
  } slot;
  std::byte* destination;
};

// What both phases keep of experts and ranks.
struct RoutingTables {
  std::uint32_t* all;     // [E + 1]: entries of all ranks
  std::uint32_t* base;    // [E]: entries of lower ranks, then the first row of this rank's entries
  std::uint32_t* map;     // [E]: owner << 16 | local number
  std::int32_t* by_rank;  // [E]
  std::int32_t* first_of_rank;  // [R + 1]
  std::uint32_t* warp_sums;     // [kNumWarps]
  std::uint32_t* num_words;     // [R]: arrival words to expect
  std::uint8_t* halves;         // [R]: of the peers' views

  TANDEM_HOST_DEVICE RoutingTables(SharedCarver& carver, int num_ranks, int num_experts) {
    all = carver.take<std::uint32_t>(num_experts + 1);
    base = carver.take<std::uint32_t>(num_experts);
    map = carver.take<std::uint32_t>(num_experts);
    by_rank = carver.take<std::int32_t>(num_experts);
    first_of_rank = carver.take<std::int32_t>(num_ranks + 1);
    warp_sums = carver.take<std::uint32_t>(kNumWarps);
    num_words = carver.take<std::uint32_t>(num_ranks);
    halves = carver.take<std::uint8_t>(num_ranks);
  }
};

// A block's share of the rows.
struct RowShare {
  std::uint32_t unit_begin;
  std::uint32_t unit_end;
  std::uint32_t first_token;
  std::uint32_t last_token;   // one past
  std::uint32_t tile_tokens;  // of which the entries fit a tile
};

struct DispatchShared {
  std::byte* rings;
  std::uint64_t* barriers;      // [kNumWarps, kMaxStages]
  Entry* entries;               // [kTileEntries]
  std::byte** peers;            // [R]: their blocks
  std::byte** row_bases;        // [R]: where rows for them go
  std::int32_t** source_bases;  // [R]: and source tokens
  Start* start;
  RowShare* share;
  UnitCursor* cursors;           // [kNumWarps]: each warp's first unit
  float* scales;                 // [kNumWarps, 2 * kMaxGroupsPerChunk]
  std::uint32_t* before;         // [E]: this rank's entries before the tile
  std::uint32_t* own;            // [E + 1]: this rank's entries; later scratch
  std::uint32_t* starts;         // [E + 1], across hosts: of own, by owner and local number
  layout::Epoch* combine_epoch;  // of the half
  int* flag;
  std::int16_t* owners;  // [kTileEntries]: of the entries' experts; -1 for none
  RoutingTables tables;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE DispatchShared(std::byte* storage, int num_ranks, int num_experts,
                                    bool elsewhere)
      : DispatchShared(SharedCarver(storage), num_ranks, num_experts, elsewhere) {}

 private:
  TANDEM_HOST_DEVICE DispatchShared(SharedCarver carver, int num_ranks, int num_experts,
                                    bool elsewhere)
      : rings(carver.take<std::byte>(kNumWarps * kRingBytes, 128)),
        barriers(carver.take<std::uint64_t>(kNumWarps * kMaxStages)),
        entries(carver.take<Entry>(kTileEntries)),
        peers(carver.take<std::byte*>(num_ranks)),
        row_bases(carver.take<std::byte*>(num_ranks)),
        source_bases(carver.take<std::int32_t*>(num_ranks)),
        start(carver.take<Start>(1)),
        share(carver.take<RowShare>(1)),
        cursors(carver.take<UnitCursor>(kNumWarps)),
        scales(carver.take<float>(kNumWarps * 2 * kMaxGroupsPerChunk)),
        before(carver.take<std::uint32_t>(num_experts)),
        own(carver.take<std::uint32_t>(num_experts + 1)),
        starts(carver.take<std::uint32_t>(elsewhere ? num_experts + 1 : 0)),
        combine_epoch(carver.take<layout::Epoch>(1)),
        flag(carver.take<int>(1)),
        owners(carver.take<std::int16_t>(kTileEntries)),
        tables(carver, num_ranks, num_experts),
        size_bytes(carver.used()) {}
};

__device__ inline int owner_of(std::uint32_t mapped) { return static_cast<int>(mapped >> 16); }
__device__ inline int local_of(std::uint32_t mapped) { return static_cast<int>(mapped & 0xffffU); }

// Fills map, by_rank and first_of_rank, which never change.
__device__ inline void load_tables(const BufferView& buffer, const RoutingTables& tables) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
    tables.map[expert] = buffer.expert_map[expert];
    tables.by_rank[expert] = buffer.by_rank[expert];
  }
#pragma unroll 1
  for (int rank = thread; rank <= buffer.num_ranks; rank += kNumThreads) {
    tables.first_of_rank[rank] = buffer.first_of_rank[rank];
  }
}

// Rows that a source has announced for an expert; none if it takes no part.
__device__ inline std::uint32_t count_of(const BufferView& buffer, const std::byte* own,
                                         layout::Epoch epoch, int source, int expert) {
  const layout::Word word =
      load_word(own, buffer.block.count(layout::parity(epoch), source, expert));
  return layout::epoch_of(word) == epoch ? layout::value_of(word) : 0;
}

// Waits for header, counts and number of arrival words of every rank of `peers`; sums the counts
// into `all` and, of lower ranks, into `base`. Returns false on this thread after a failure. `sent`
// [E]: this rank's own counts, where rows are to be written by what comes out: those in its memory
// can be written by peers, and are not even looked at then.
__device__ inline bool read_counts(const DispatchParams& p, const RoutingTables& tables,
                                   layout::Epoch epoch, std::byte* const* peers,
                                   const std::uint32_t* sent) {
  const BufferView& buffer = p.buffer;
  const int thread = static_cast<int>(threadIdx.x);
  const int parity = layout::parity(epoch);
  const int per_rank = buffer.num_experts + 2;
  const int num_read = buffer.num_ranks - (sent != nullptr ? 1 : 0);
  const std::byte* own = buffer.blocks[buffer.rank];
  const auto most = static_cast<std::uint32_t>(p.max_tokens) * static_cast<std::uint32_t>(p.topk);
  if (sent != nullptr) {
#pragma unroll 1
    for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
      if (sent[expert] != 0) atomicAdd(&tables.all[expert], sent[expert]);
    }
    if (thread == 0) {
      tables.halves[buffer.rank] = static_cast<std::uint8_t>(p.half);
      tables.num_words[buffer.rank] = gridDim.x;
    }
  }
  bool ok = true;
#pragma unroll 1
  for (int i = thread; ok && i < per_rank * num_read; i += kNumThreads) {
    int rank = i / per_rank;
    const int which = i - rank * per_rank;
    if (sent != nullptr && rank >= buffer.rank) ++rank;
    if (peers[rank] == nullptr) {
      if (which == buffer.num_experts) tables.num_words[rank] = 0;
      continue;
    }
    const Wait wait{Operation::kDispatch, epoch, Phase::kHeader, rank};
    if (which == buffer.num_experts + 1) {
      int half = 0;
      ok = wait_for_header(buffer, wait, own, p.arguments_hash, p.arguments, &half);
      tables.halves[rank] = static_cast<std::uint8_t>(half);
      continue;
    }
    const std::int64_t offset = which < buffer.num_experts
                                    ? buffer.block.count(parity, rank, which)
                                    : buffer.block.arrived(parity, rank, kNumBlocksWord);
    layout::Word word;
    ok = wait_for_epoch(buffer, wait, own, offset, &word);
    const std::uint32_t value = layout::value_of(word);
    const std::uint32_t limit = which == buffer.num_experts ? kMaxBlocks : most;
    if (ok && value > limit) {
      report(buffer, wait.operation, epoch,
             {ErrorCode::kMismatch, wait.phase, rank, limit, value, kImpossibleCount, 0}, true);
      ok = false;
    }
    if (which == buffer.num_experts) {
      tables.num_words[rank] = ok ? value : 0;
    } else if (ok && value != 0) {
      atomicAdd(&tables.all[which], value);
      if (rank < buffer.rank) atomicAdd(&tables.base[which], value);
    }
  }
  return ok;
}

// After read_counts has returned false somewhere: it is to be called again, without those who are
// lost. Otherwise as strike_lost.
static __device__ __noinline__ bool count_without_lost(const BufferView& buffer,
                                                       layout::Epoch epoch, int half,
                                                       std::byte** peers, std::uint32_t* all,
                                                       std::uint32_t* base) {
  if (!strike_lost(buffer, epoch, half, peers)) return false;
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < buffer.num_experts;
       expert += kNumThreads) {
    all[expert] = 0;
    base[expert] = 0;
  }
  __syncthreads();
  return true;
}

// kPacked layout: `scan` becomes prefix sums of the aligned counts in the order of by_rank; the
// difference to the owner's first expert is an expert's first row.
__device__ inline void scan_starts(const std::uint32_t* counts, std::uint32_t alignment,
                                   int num_experts, const RoutingTables& tables,
                                   std::uint32_t* scan) {
  block_scan(
      num_experts, tables.warp_sums,
      [&](int position) {
        const std::uint32_t count = counts[tables.by_rank[position]];
        return alignment == 1 ? count : (count + alignment - 1) / alignment * alignment;
      },
      [&](int position, std::uint32_t sum) { scan[position] = sum; });
}

struct Excess {
  std::int64_t rows = -1;  // not negative: there is one
  std::int64_t limit = 0;
  std::int64_t kind = kExcessOfRank;
  int id = 0;
  int rank = -1;
};

// Every thread of every block, and every rank, comes to the same verdict: it depends on the count
// matrix alone. Ends with a barrier.
__device__ inline bool any_excess(const BufferView& buffer, layout::Epoch epoch,
                                  const Excess& excess) {
  if (excess.rows >= 0) {
    report(buffer, Operation::kDispatch, epoch,
           {ErrorCode::kCapacity, Phase::kNone, excess.rank, excess.limit, excess.rows,
            (excess.kind << 32) | excess.id, 0},
           false);
  }
  return __syncthreads_or(static_cast<int>(excess.rows >= 0)) != 0;
}

// Adds the start of each expert to base[e]; returns whether some rank's rows do not fit. All
// threads call it. `scan` is scratch of E + 1 words.
__device__ inline bool add_starts(const DispatchParams& p, layout::Epoch epoch,
                                  const RoutingTables& tables, std::uint32_t* scan) {
  const BufferView& buffer = p.buffer;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t rows_per_expert = std::int64_t{buffer.num_ranks} * p.max_tokens;
  Excess excess;
  if (p.padded == 0) {
    scan_starts(tables.all, static_cast<std::uint32_t>(p.row_alignment), buffer.num_experts, tables,
                scan);
  }
#pragma unroll 1
  for (int rank = thread; rank < buffer.num_ranks; rank += kNumThreads) {
    const int first = tables.first_of_rank[rank];
    const int end = tables.first_of_rank[rank + 1];
    const std::int64_t rows =
        p.padded != 0 ? (end - first) * rows_per_expert : std::int64_t{scan[end] - scan[first]};
    const std::int64_t limit = buffer.block.capacity().rows;
    if (rows > limit) excess = {rows, limit, kExcessOfRank, 0, rank};
  }
#pragma unroll 1
  for (int expert = thread; expert < buffer.num_experts; expert += kNumThreads) {
    const std::uint32_t mapped = tables.map[expert];
    if (p.padded != 0) {
      tables.base[expert] += static_cast<std::uint32_t>(local_of(mapped) * rows_per_expert);
      if (tables.all[expert] > rows_per_expert) {
        excess = {tables.all[expert], rows_per_expert, kExcessOfExpert, expert, owner_of(mapped)};
      }
    } else {
      const int first = tables.first_of_rank[owner_of(mapped)];
      tables.base[expert] += scan[first + local_of(mapped)] - scan[first];
    }
  }
  return any_excess(buffer, epoch, excess);
}

// Rows of a landing region that belong to one source.
__device__ inline std::int64_t rows_per_source(const DispatchParams& p, const RoutingTables& tables,
                                               int owner) {
  const int num_local = tables.first_of_rank[owner + 1] - tables.first_of_rank[owner];
  return std::int64_t{p.max_tokens} * min(p.topk, num_local);
}

template <typename T>
__device__ __forceinline__ T* in_outbox(const BufferView& buffer, std::int64_t offset) {
  return reinterpret_cast<T*>(buffer.remote->outbox + offset);
}

// What dispatch hands out besides rows: counts, offsets, ranges of this rank's experts.
// `scan` as add_starts left it. kElsewhere: for the host too, which sends expert outputs to peers
// on other hosts.
template <bool kElsewhere>
__device__ inline void write_handle_arrays(const DispatchParams& p, layout::Epoch epoch,
                                           const RoutingTables& tables, const std::uint32_t* scan,
                                           bool overflow) {
  const BufferView& buffer = p.buffer;
  const BufferView::Arrays& arrays = buffer.arrays[p.half];
  const int first = tables.first_of_rank[buffer.rank];
  const int num_local = tables.first_of_rank[buffer.rank + 1] - first;
  const std::byte* own = buffer.blocks[buffer.rank];
#pragma unroll 1
  for (int local = static_cast<int>(threadIdx.x); local <= num_local; local += kNumThreads) {
    std::int64_t offset = std::int64_t{local} * buffer.num_ranks * p.max_tokens;
    if (p.padded == 0) offset = scan[first + local] - scan[first];
    arrays.offsets[local] = overflow ? 0 : offset;
    if constexpr (kElsewhere) {
      in_outbox<std::int64_t>(buffer, buffer.remote->layout.offsets(p.half))[local] =
          arrays.offsets[local];
    }
    if (local == num_local) continue;
    const int expert = tables.by_rank[first + local];
    arrays.counts[local] = overflow ? 0 : static_cast<std::int32_t>(tables.all[expert]);
    // This rank's own may not be there yet: another block publishes them, and read_counts does not
    // look at them.
    layout::Word own_count = 0;
    wait_for_epoch(buffer, {Operation::kDispatch, epoch, Phase::kHeader, buffer.rank}, own,
                   buffer.block.count(layout::parity(epoch), buffer.rank, expert), &own_count);
    std::uint64_t lower = 0;
#pragma unroll 4
    for (int rank = 0; rank < buffer.num_ranks; ++rank) {
      const std::uint64_t count = overflow ? 0 : count_of(buffer, own, epoch, rank, expert);
      const std::int64_t at = std::int64_t{local} * buffer.num_ranks + rank;
      arrays.ranges[at] = static_cast<std::int64_t>((lower << 32) | count);
      if constexpr (kElsewhere) {
        in_outbox<std::int64_t>(buffer, buffer.remote->layout.ranges(p.half))[at] =
            arrays.ranges[at];
      }
      lower += count;
    }
  }
}

// Waits until every block of every peer has said that its rows are here (num_words[r]
// says how many there are). Returns false on this thread if a wait failed.
__device__ inline bool wait_for_rows(const BufferView& buffer, layout::Epoch epoch,
                                     const std::uint32_t* num_words) {
  const std::byte* own = buffer.blocks[buffer.rank];
  bool ok = true;
  int word_index = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int rank = 0; rank < buffer.num_ranks && ok; ++rank) {
    const int expected = static_cast<int>(num_words[rank]);
    for (; ok && word_index < expected; word_index += kNumThreads) {
      layout::Word word;
      ok = wait_for_epoch(
          buffer, {Operation::kDispatch, epoch, Phase::kRows, rank}, own,
          buffer.block.arrived(layout::parity(epoch), rank, kFirstBlockWord + word_index), &word);
    }
    word_index -= expected;
  }
  ptx::fence(buffer.across_devices != 0);  // acquire: pairs with the fence before the arrival words
  return ok;
}

// Rows in this rank's own memory, and their source tokens.
struct OwnRows {
  std::byte* rows;
  std::int32_t* sources;
  std::int64_t pitch;
};

__device__ inline void clear_rows(const OwnRows& own, std::int64_t begin, std::int64_t count) {
  const int thread = static_cast<int>(threadIdx.x);
  auto* const pieces = reinterpret_cast<uint4*>(own.rows + begin * own.pitch);
#pragma unroll 1
  for (std::int64_t i = thread; i < count * own.pitch / 16; i += kNumThreads) {
    pieces[i] = uint4{0, 0, 0, 0};
  }
#pragma unroll 1
  for (std::int64_t i = thread; i < count; i += kNumThreads) own.sources[begin + i] = -1;
}

// After wait_for_rows has returned false somewhere: rows that lost ranks have announced, and that
// will not come, are zeros of source token -1, where senders write them; nobody waits for them any
// more (num_words). All threads call it. `scan` as add_starts left it. False, on all: operations
// have failed.
static __device__ __noinline__ bool go_on_without_rows(const DispatchParams& p, layout::Epoch epoch,
                                                       const std::uint32_t* scan, bool overflow,
                                                       std::uint32_t* num_words) {
  const BufferView& buffer = p.buffer;
  const int thread = static_cast<int>(threadIdx.x);
  const int parity = layout::parity(epoch);
  std::byte* const block = buffer.blocks[buffer.rank];
  const auto any = [](bool found) { return __syncthreads_or(static_cast<int>(found)) != 0; };
  if (any(thread == 0 && is_halted(buffer, block))) return false;
  const bool slotted = p.slotted != 0;
  const std::int64_t rows_at =
      slotted ? buffer.block.landing_rows(parity) : buffer.block.view_rows(p.half);
  const std::int64_t sources_at =
      slotted ? buffer.block.landing_sources(parity) : buffer.block.view_sources(p.half);
  const OwnRows own{.rows = block + rows_at,
                    .sources = reinterpret_cast<std::int32_t*>(block + sources_at),
                    .pitch = p.pitch};
  const int first = buffer.first_of_rank[buffer.rank];
  const int num_local = buffer.first_of_rank[buffer.rank + 1] - first;
  bool found = false;
#pragma unroll 1
  for (int rank = 0; rank < buffer.num_ranks; ++rank) {
    const auto expected = static_cast<int>(num_words[rank]);
    if (expected == 0 || !any(thread == 0 && is_lost(buffer, block, rank))) continue;
    ptx::fence_sys();  // it wrote its last word before
    bool lacks = false;
    for (int i = thread; i < expected; i += kNumThreads) {
      const layout::Word word =
          load_word(block, buffer.block.arrived(parity, rank, kFirstBlockWord + i));
      lacks = lacks || layout::epoch_of(word) != epoch;
    }
    if (!any(lacks)) continue;
    found = true;
    std::int64_t landed = std::int64_t{rank} * p.max_tokens * min(p.topk, num_local);
#pragma unroll 1
    for (int local = 0; local < num_local && !overflow; ++local) {
      const int expert = buffer.by_rank[first + local];
      const std::int64_t count = count_of(buffer, block, epoch, rank, expert);
      std::int64_t begin = landed;
      if (!slotted) {
        begin = p.padded != 0 ? std::int64_t{local} * buffer.num_ranks * p.max_tokens
                              : scan[first + local] - scan[first];
        for (int lower = 0; lower < rank; ++lower) {
          begin += count_of(buffer, block, epoch, lower, expert);
        }
      }
      clear_rows(own, begin, count);
      landed += count;
    }
    if (thread == 0) {
      num_words[rank] = 0;
      note_absence(buffer, p.half, rank, epoch);
    }
  }
  __syncthreads();
  return found;
}

}  // namespace tandem::cuda
