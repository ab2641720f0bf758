// Combine: `ready` to every peer, then each token's K rows from their owners, weighted and summed;
// and the kernel that stages a caller's tensor into the combine region first.
#include "backend/cuda/block_tools.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/outbox.cuh"
#include "backend/cuda/roster.cuh"
#include "backend/cuda/row_copy.cuh"
#include "backend/cuda/row_ring.cuh"
#include "backend/cuda/wait.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kCombine;
constexpr int kUnroll = 8;  // rows in flight per thread

// An entry (token, k): where its row lies, and what it weighs.
union EntrySource {
  Route route;           // until `ready` has come
  const std::byte* row;  // null: none
};

struct CombineShared {
  EntrySource* entries;         // [kTileEntries], k padded to a multiple of kUnroll
  float* weights;               // [kTileEntries]
  std::byte** peers;            // [R]
  const std::byte** row_bases;  // [R]: first row of each peer's combine region
  Start* start;
  HalfState* half;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE CombineShared(std::byte* storage, int num_ranks) {
    SharedCarver carver(storage);
    entries = carver.take<EntrySource>(kTileEntries);
    peers = carver.take<std::byte*>(num_ranks);
    row_bases = carver.take<const std::byte*>(num_ranks);
    start = carver.take<Start>(1);
    half = carver.take<HalfState>(1);
    weights = carver.take<float>(kTileEntries);
    size_bytes = carver.used();
  }
};

// What ranks must agree on, the epoch of the dispatch among it.
struct Arguments {
  std::uint32_t values[layout::kNumArguments];
};
__device__ Arguments arguments_of(const CombineParams& p, const HalfState& half) {
  return {{half.dispatch_epoch, p.shape_argument, p.alignment_argument}};
}

__device__ __forceinline__ bool holds_rows_of(const CombineParams& p, const HalfState& half) {
  return half.dispatch_id == p.dispatch_id && half.has_rows != 0;
}

// Rule 1, then `ready` to every peer: by one warp, whose fence before this releases what the
// earlier kernels of the stream, or this kernel's blocks, wrote to the combine region. Pairs with
// the fence after the wait for headers in combine_kernel.
template <bool kElsewhere>
__device__ void publish_ready(const CombineParams& p, const HalfState& half,
                              const Arguments& arguments, layout::Epoch epoch,
                              std::byte* const* peers) {
  const BufferView& buffer = p.buffer;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int parity = layout::parity(epoch);
  const std::uint32_t header =
      layout::encode(layout::Header{kOperation, p.half, layout::hash_arguments(arguments.values)});
  bool entered = true;
#pragma unroll 1
  for (int rank = lane; entered && rank < buffer.num_ranks; rank += 32) {
    entered = wait_for_completed(buffer, {kOperation, epoch, Phase::kEnter, rank},
                                 peers[buffer.rank], epoch - 2);
  }
  if (__all_sync(0xffffffffU, static_cast<int>(entered)) == 0) return;
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
                  .operation = kOperation,
                  .half = static_cast<std::uint8_t>(p.half),
                  .has_rows = static_cast<std::uint8_t>(holds_rows_of(p, half)),
                  .epoch = epoch};
  for (int i = 0; i < layout::kNumArguments; ++i) request.arguments[i] = arguments.values[i];
  post(buffer, request);
}

// The handle's dispatch is the one that this half holds; else, reported, there is nothing to send.
__device__ bool is_fresh(const CombineParams& p, const HalfState& half, layout::Epoch epoch,
                         bool reports) {
  if (half.dispatch_id == p.dispatch_id) return half.has_rows != 0;
  if (reports) {
    report(p.buffer, kOperation, epoch,
           {ErrorCode::kStaleHandle, Phase::kNone, -1, static_cast<std::int64_t>(p.dispatch_id),
            static_cast<std::int64_t>(half.dispatch_id), 0, 0},
           false);
  }
  return false;
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

// Which 512-byte pieces of output rows a block gathers: a warp's work is one piece.
struct Share {
  std::uint32_t begin;  // pieces, counted through all tokens
  std::uint32_t end;
  std::uint32_t first_token;
  std::uint32_t last_token;  // one past
};

__device__ Share share_of(const CombineParams& p) {
  const std::uint32_t begin =
      blockIdx.x * p.pieces_per_block + min(blockIdx.x, p.blocks_with_one_more);
  const std::uint32_t end =
      begin + p.pieces_per_block + (blockIdx.x < p.blocks_with_one_more ? 1U : 0U);
  if (begin == end) return {begin, end, 0, 0};
  return {begin, end, begin / p.pieces_per_row, (end - 1) / p.pieces_per_row + 1};
}

// Loads routes and weights of the tile that begins at `token`.
__device__ void load_entries(const CombineParams& p, const CombineShared& s, std::uint32_t token,
                             std::uint32_t num_tokens, int padded_topk) {
  const Route* routes = p.buffer.arrays[p.half].routes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(num_tokens) * padded_topk;
       i += kCombineThreads) {
    const int row = i / padded_topk;
    const int k = i - row * padded_topk;
    const std::int64_t at = std::int64_t{token + row} * p.topk + k;
    s.entries[i].route = k < p.topk ? routes[at] : kNoRoute;
    s.weights[i] = k < p.topk ? p.weights[at] : 0.0F;
  }
}

// Each thread its own entries: the same loop as in load_entries.
__device__ void find_rows(const CombineShared& s, int num_entries, std::int64_t pitch,
                          bool has_rows) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_entries; i += kCombineThreads) {
    const Route route = s.entries[i].route;
    const std::byte* base =
        route < 0 || !has_rows ? nullptr : s.row_bases[route >> kRouteOwnerShift];
    s.entries[i].row =
        base == nullptr ? nullptr : base + (route & ((Route{1} << kRouteOwnerShift) - 1)) * pitch;
  }
}

template <typename T>
__device__ void gather_piece(const CombineParams& p, const EntrySource* entries,
                             const float* weights, int padded_topk, std::uint32_t token, int at) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int row_bytes = p.hidden * static_cast<int>(sizeof(T));
  float sums[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[i] = 0.0F;
#pragma unroll 1
  for (int first = 0; first < padded_topk; first += kUnroll) {
    uint4 pieces[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const std::byte* row = entries[first + j].row;
      pieces[j] = ptx::load_once_if(row + at, row != nullptr && at < row_bytes);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (entries[first + j].row == nullptr) continue;
      const float scale = weights[first + j];
      float values[kVector];
      unpack<T>(pieces[j], values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(scale, values[i]));
    }
  }
  if (at >= row_bytes) return;
  const uint4 result = pack<T>(sums);
  std::byte* out = p.out + token * p.out_pitch + at;
  if (p.out_aligned != 0 && at + 16 <= row_bytes) {
    ptx::store_once(out, result);
    return;
  }
  const std::uint32_t words[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (at + i * static_cast<int>(sizeof(T)) >= row_bytes) break;
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<std::uint32_t*>(out)[i] = words[i];
    } else {
      reinterpret_cast<std::uint16_t*>(out)[i] =
          static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

template <typename T, bool kElsewhere>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const CombineShared s(storage, buffer.num_ranks);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  ptx::wait_for_earlier_grids();
  stamp(buffer, 16);
  const FirstLook first_look(buffer, own);

  // Everything that depends on nothing else is asked for at once.
  if (thread == 0) {
    // The words that all blocks read are read by one thread: L2 serves a line to one at a time.
    PhaseCounter& counter = p.sends != 0 ? state.send : state.receive;
    *s.start = {ptx::load_relaxed(&counter.epoch), take_ticket(counter)};
  }
  if (thread == 96) *s.half = state.half[p.half];
  const int padded_topk = (p.topk + kUnroll - 1) / kUnroll * kUnroll;
  const std::uint32_t tile_tokens = static_cast<std::uint32_t>(kTileEntries / padded_topk);
  const Share share = p.receives != 0 ? share_of(p) : Share{0, 0, 0, 0};
  std::uint32_t tile_end = min(share.last_token, share.first_token + tile_tokens);
  load_entries(p, s, share.first_token, tile_end - share.first_token, padded_topk);
  const bool in_publishing_warp = thread / 32 == 1;  // not the one that waits for its ticket
  if (in_publishing_warp) ptx::fence(buffer.across_devices != 0);
  const bool special = __syncthreads_or(static_cast<int>(first_look.is_special(buffer))) != 0;
  const layout::Epoch epoch = s.start->epoch;
  if (special && !strike_absent(buffer, kOperation, epoch, false, s.peers)) return;
  const Arguments arguments = arguments_of(p, *s.half);
  stamp(buffer, 17);

  if (p.sends != 0 && s.start->ticket == 0) {
    if (in_publishing_warp) publish_ready<kElsewhere>(p, *s.half, arguments, epoch, s.peers);
    if (thread == 0) state.half[p.half].combine_epoch = epoch;
  }
  const bool has_rows = is_fresh(p, *s.half, epoch, blockIdx.x == 0 && thread == 0);
  if (p.receives == 0) {
    if (thread == 0) move_on(state, epoch, true, false);  // the only block
    return;
  }
  stamp(buffer, 18);

  // A block with tokens needs `ready` from their owners; it asks all ranks, and so finds out if one
  // of them calls something else.
  bool ok = true;
  if (share.begin < share.end && has_rows) {
#pragma unroll 1
    for (int rank = thread; ok && rank < buffer.num_ranks; rank += kCombineThreads) {
      s.row_bases[rank] = nullptr;
      if (s.peers[rank] == nullptr) continue;
      int half = 0;
      ok = wait_for_header(buffer, {kOperation, epoch, Phase::kReady, rank}, own,
                           layout::hash_arguments(arguments.values), arguments.values, &half);
      s.row_bases[rank] = is_elsewhere<kElsewhere>(buffer, s.peers[rank])
                              ? buffer.remote->landing[layout::parity(epoch)]
                              : s.peers[rank] + buffer.block.combine_rows(half);
      ptx::fence(buffer.across_devices != 0);  // acquire: pairs with the fence of publish_ready
    }
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;
  stamp(buffer, 19);
  const auto pitch = static_cast<std::int64_t>(
      layout::round_up(p.hidden * static_cast<int>(sizeof(T)), layout::kRowAlignment));
#pragma unroll 1
  for (std::uint32_t tile_token = share.first_token; tile_token < share.last_token;) {
    find_rows(s, static_cast<int>(tile_end - tile_token) * padded_topk, pitch, has_rows);
    __syncthreads();
    const std::uint32_t first_piece = max(share.begin, tile_token * p.pieces_per_row);
    const std::uint32_t end_piece = min(share.end, tile_end * p.pieces_per_row);
#pragma unroll 1
    for (std::uint32_t piece = first_piece + thread / 32; piece < end_piece;
         piece += kCombineThreads / 32) {
      const std::uint32_t token = piece / p.pieces_per_row;
      const int at = static_cast<int>((piece - token * p.pieces_per_row) * 32 + thread % 32) * 16;
      const std::uint32_t entry = (token - tile_token) * padded_topk;
      gather_piece<T>(p, s.entries + entry, s.weights + entry, padded_topk, token, at);
    }
    tile_token = tile_end;
    if (tile_token >= share.last_token) break;
    tile_end = min(share.last_token, tile_token + tile_tokens);
    __syncthreads();
    load_entries(p, s, tile_token, tile_end - tile_token, padded_topk);
  }
  __syncthreads();
  ptx::let_next_grid_start();
  stamp(buffer, 20);
  if (thread >= 32) return;  // one warp ends the block, and the last block's the operation
  const bool last = thread == 0 && is_last_done(state);
  if (__shfl_sync(0xffffffffU, static_cast<int>(last), 0) == 0) return;
  if (thread == 0) move_on(state, epoch, p.sends != 0, true);
  publish_completed(buffer, epoch, s.peers, 32);
  if (thread == 0) post_completed<kElsewhere>(buffer, kOperation, p.half, epoch);
  stamp(buffer, 21);
}

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

template <bool kElsewhere>
__global__ void __launch_bounds__(kNumThreads, 1)
    combine_stage_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const StageShared s(storage, buffer.num_ranks);
  const int thread = static_cast<int>(threadIdx.x);
  DeviceState& state = *buffer.state;
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  ptx::wait_for_earlier_grids();
  const FirstLook first_look(buffer, own);
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
                            half.combine_epoch);  // rule 2
  }
  if (__syncthreads_or(static_cast<int>(!ok)) != 0) return;

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

template <typename T>
const void* either(bool elsewhere) {
  return elsewhere ? reinterpret_cast<const void*>(&combine_kernel<T, true>)
                   : reinterpret_cast<const void*>(&combine_kernel<T, false>);
}

}  // namespace

const void* acquire_kernel() { return reinterpret_cast<const void*>(&combine_acquire_kernel); }

const void* combine_kernel_for(DType dtype, bool elsewhere) {
  switch (dtype) {
    case DType::kBFloat16:
      return either<__nv_bfloat16>(elsewhere);
    case DType::kFloat16:
      return either<__half>(elsewhere);
    default:
      return either<float>(elsewhere);
  }
}

const void* stage_kernel(bool elsewhere) {
  return elsewhere ? reinterpret_cast<const void*>(&combine_stage_kernel<true>)
                   : reinterpret_cast<const void*>(&combine_stage_kernel<false>);
}

bool is_combine_kernel(const void* kernel) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool elsewhere : {false, true}) {
      if (kernel == combine_kernel_for(dtype, elsewhere)) return true;
    }
  }
  return false;
}

std::int64_t combine_shared_bytes(int num_ranks) {
  return CombineShared(nowhere(), num_ranks).size_bytes;
}

std::int64_t stage_shared_bytes(int num_ranks) {
  return StageShared(nowhere(), num_ranks).size_bytes;
}

}  // namespace tandem::cuda
