// Combine: `ready` to every peer, then each token's K rows from their owners, weighted and summed.
#include "backend/cuda/combine_shared.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/row_ring.cuh"

namespace tandem::cuda {
namespace {

constexpr Operation kOperation = Operation::kCombine;
constexpr int kUnroll = 8;  // rows of a piece that a thread asks for at once
constexpr int kPieces = 2;  // pieces of a warp at a time: their rows come together

// An entry (token, k): where its row lies, and what it weighs.
union EntrySource {
  Route route;           // until `ready` has come
  const std::byte* row;  // null: none
};

// Which 512-byte pieces of output rows a block gathers: a warp's work is one piece.
struct Share {
  std::uint32_t begin;  // pieces, counted through all tokens
  std::uint32_t end;
  std::uint32_t first_token;
  std::uint32_t last_token;   // one past
  std::uint32_t tile_tokens;  // of which the entries fit a tile
};

struct CombineShared {
  EntrySource* entries;         // [kTileEntries], k padded to a multiple of kUnroll
  float* weights;               // [kTileEntries]: 0 where there is no row
  std::byte** peers;            // [R]
  const std::byte** row_bases;  // [R]: first row of each peer's combine region
  Start* start;
  Share* share;
  HalfState* half;
  std::int64_t size_bytes;

  TANDEM_HOST_DEVICE CombineShared(std::byte* storage, int num_ranks) {
    SharedCarver carver(storage);
    entries = carver.take<EntrySource>(kTileEntries);
    peers = carver.take<std::byte*>(num_ranks);
    row_bases = carver.take<const std::byte*>(num_ranks);
    start = carver.take<Start>(1);
    share = carver.take<Share>(1);
    half = carver.take<HalfState>(1);
    weights = carver.take<float>(kTileEntries);
    size_bytes = carver.used();
  }
};

// Rule 1, by one warp. `completed`: of the rank that is this lane's number, as read before.
__device__ bool may_enter(const BufferView& buffer, layout::Epoch epoch, layout::Word completed) {
  const std::byte* own = buffer.blocks[buffer.rank];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool entered = layout::has_reached(layout::epoch_of(completed), epoch - 2);
#pragma unroll 1
  for (int rank = entered ? lane + 32 : lane; rank < buffer.num_ranks; rank += 32) {
    entered = wait_for_completed(buffer, {kOperation, epoch, Phase::kEnter, rank}, own, epoch - 2);
    if (!entered) break;
  }
  return __all_sync(0xffffffffU, static_cast<int>(entered || lane >= buffer.num_ranks)) != 0;
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

__device__ Share share_of(const CombineParams& p, int padded_topk) {
  const std::uint32_t tile_tokens = kTileEntries / static_cast<std::uint32_t>(padded_topk);
  if (p.receives == 0) return {0, 0, 0, 0, tile_tokens};
  const std::uint32_t begin =
      blockIdx.x * p.pieces_per_block + min(blockIdx.x, p.blocks_with_one_more);
  const std::uint32_t end =
      begin + p.pieces_per_block + (blockIdx.x < p.blocks_with_one_more ? 1U : 0U);
  if (begin == end) return {begin, end, 0, 0, tile_tokens};
  return {begin, end, begin / p.pieces_per_row, (end - 1) / p.pieces_per_row + 1, tile_tokens};
}

// Loads routes and weights of the tile that begins at `token`.
__device__ void load_entries(const CombineParams& p, const CombineShared& s, std::uint32_t token,
                             std::uint32_t num_tokens, int padded_topk) {
  const Route* routes = p.buffer.arrays[p.half].routes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(num_tokens) * padded_topk;
       i += static_cast<int>(blockDim.x)) {
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
  for (int i = static_cast<int>(threadIdx.x); i < num_entries; i += static_cast<int>(blockDim.x)) {
    const Route route = s.entries[i].route;
    const std::byte* base =
        route < 0 || !has_rows ? nullptr : s.row_bases[route >> kRouteOwnerShift];
    const std::int64_t row = route & ((Route{1} << kRouteOwnerShift) - 1);
    s.entries[i].row = base == nullptr ? nullptr : base + row * pitch;
    if (base == nullptr) s.weights[i] = 0.0F;
  }
}

// A warp's piece of an output row, and a lane's 16 bytes of it.
struct Piece {
  std::uint32_t token;
  int at;     // offset of the lane's bytes
  int entry;  // first of the token's entries in the tile
};

// Rows that are not there are zeros: with a weight of 0 they leave a sum as it is.
__device__ __forceinline__ void load_rows(const EntrySource* entries, int at, bool wanted,
                                          uint4 (&rows)[kUnroll]) {
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const std::byte* row = entries[j].row;
    rows[j] = ptx::load_once_if(row + at, wanted && row != nullptr);
  }
}

template <typename T, int kVector>
__device__ __forceinline__ void add_rows(const uint4 (&rows)[kUnroll], const float* weights,
                                         float (&sums)[kVector]) {
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const float weight = weights[j];
    float values[kVector];
    unpack<T>(rows[j], values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, values[i]));
  }
}

template <typename T>
__device__ __forceinline__ void store_sums(const CombineParams& p, const Piece& piece,
                                           const float (&sums)[16 / sizeof(T)]) {
  const int row_bytes = p.hidden * static_cast<int>(sizeof(T));
  if (piece.at >= row_bytes) return;
  const uint4 result = pack<T>(sums);
  std::byte* out = p.out + piece.token * p.out_pitch + piece.at;
  if (p.out_aligned != 0 && piece.at + 16 <= row_bytes) {
    ptx::store_once(out, result);
    return;
  }
  const std::uint32_t words[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    if (piece.at + i * static_cast<int>(sizeof(T)) >= row_bytes) break;
    if constexpr (sizeof(T) == 4) {
      reinterpret_cast<std::uint32_t*>(out)[i] = words[i];
    } else {
      reinterpret_cast<std::uint16_t*>(out)[i] =
          static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
    }
  }
}

// The sums of kNum pieces.
template <typename T, int kNum>
__device__ __forceinline__ void gather(const CombineParams& p, const CombineShared& s,
                                       const Piece (&pieces)[kNum], int padded_topk) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int row_bytes = p.hidden * static_cast<int>(sizeof(T));
  float sums[kNum][kVector] = {};
#pragma unroll 1
  for (int first = 0; first < padded_topk; first += kUnroll) {
    uint4 rows[kNum][kUnroll];
#pragma unroll
    for (int n = 0; n < kNum; ++n) {
      load_rows(s.entries + pieces[n].entry + first, pieces[n].at, pieces[n].at < row_bytes,
                rows[n]);
    }
#pragma unroll
    for (int n = 0; n < kNum; ++n) {
      add_rows<T>(rows[n], s.weights + pieces[n].entry + first, sums[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kNum; ++n) store_sums<T>(p, pieces[n], sums[n]);
}

template <typename T, Variant kVariant>
__global__ void __launch_bounds__(kNumThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
  constexpr bool kElsewhere = has_elsewhere(kVariant);
  constexpr bool kWatched = has_watch(kVariant);
  extern __shared__ __align__(128) std::byte storage[];
  const BufferView& buffer = p.buffer;
  const CombineShared s(storage, buffer.num_ranks);
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  DeviceState& state = *buffer.state;
  list_peers(buffer, s.peers);
  const std::byte* own = buffer.blocks[buffer.rank];
  const int padded_topk = (p.topk + kUnroll - 1) / kUnroll * kUnroll;
  // In shared memory it is there before the wait, whatever the compiler would like to put off.
  if (thread == 0) *s.share = share_of(p, padded_topk);
  __syncthreads();
  const bool in_publishing_warp = thread / 32 == 1;  // not the one that waits for its ticket
  ptx::wait_for_earlier_grids();
  const AtWork<kWatched> at_work(buffer);
  stamp(buffer, 16);
  const FirstLook<kWatched> first_look(buffer, own);

  // Everything that depends on nothing else is asked for at once.
  Start own_start{};
  if (thread == 0) {
    // The words that all blocks read are read by one thread: L2 serves a line to one at a time.
    PhaseCounter& counter = p.sends != 0 ? state.send : state.receive;
    own_start = {ptx::load_relaxed(&counter.epoch), take_ticket(counter)};
  }
  if (thread == 96) *s.half = state.half[p.half];
  layout::Word completed = 0;
  if (in_publishing_warp && thread % 32 < buffer.num_ranks) {
    completed = load_word(own, buffer.block.completed(thread % 32));
  }
  const Share share = *s.share;
  std::uint32_t tile_end = min(share.last_token, share.first_token + share.tile_tokens);
  load_entries(p, s, share.first_token, tile_end - share.first_token, padded_topk);
  if (thread == 0) *s.start = own_start;
  if (in_publishing_warp) ptx::fence(buffer.across_devices != 0);
  const bool special = __syncthreads_or(static_cast<int>(first_look.is_special(buffer))) != 0;
  const layout::Epoch epoch = s.start->epoch;
  if (special && !strike_absent(buffer, kOperation, epoch, false, s.peers)) return;
  const CombineArguments arguments = arguments_of(p, *s.half);
  stamp(buffer, 17);

  if (p.sends != 0 && s.start->ticket == 0) {
    if (in_publishing_warp && may_enter(buffer, epoch, completed)) {
      publish_ready<kElsewhere>(p, *s.half, arguments, epoch, s.peers);
    }
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
#pragma unroll 1
  for (;;) {
    bool ok = true;
    if (share.begin < share.end && has_rows) {
#pragma unroll 1
      for (int rank = thread; ok && rank < buffer.num_ranks; rank += num_threads) {
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
    if (__syncthreads_or(static_cast<int>(!ok)) == 0) break;
    if (!kWatched || !strike_lost(buffer, epoch, p.half, s.peers)) return;
  }
  ptx::let_next_grid_start();  // this one waits for nobody from here on
  stamp(buffer, 19);
  const auto pitch = static_cast<std::int64_t>(
      layout::round_up(p.hidden * static_cast<int>(sizeof(T)), layout::kRowAlignment));
#pragma unroll 1
  for (std::uint32_t tile_token = share.first_token; tile_token < share.last_token;) {
    find_rows(s, static_cast<int>(tile_end - tile_token) * padded_topk, pitch, has_rows);
    __syncthreads();
    const std::uint32_t first_piece = max(share.begin, tile_token * p.pieces_per_row);
    const std::uint32_t end_piece = min(share.end, tile_end * p.pieces_per_row);
    const auto piece_at = [&](std::uint32_t number) {
      const std::uint32_t token = number / p.pieces_per_row;
      return Piece{
          .token = token,
          .at = static_cast<int>((number - token * p.pieces_per_row) * 32 + thread % 32) * 16,
          .entry = static_cast<int>(token - tile_token) * padded_topk};
    };
    const auto num_warps = static_cast<std::uint32_t>(num_threads) / 32;
    std::uint32_t number = first_piece + thread / 32;
#pragma unroll 1
    for (; number + num_warps < end_piece; number += kPieces * num_warps) {
      gather<T, kPieces>(p, s, {piece_at(number), piece_at(number + num_warps)}, padded_topk);
    }
    if (number < end_piece) gather<T, 1>(p, s, {piece_at(number)}, padded_topk);
    tile_token = tile_end;
    if (tile_token >= share.last_token) break;
    tile_end = min(share.last_token, tile_token + share.tile_tokens);
    __syncthreads();
    load_entries(p, s, tile_token, tile_end - tile_token, padded_topk);
  }
  __syncthreads();
  stamp(buffer, 20);
  if (thread >= 32) return;  // one warp ends the block, and the last block's the operation
  const bool last = thread == 0 && is_last_done(state);
  if (__shfl_sync(0xffffffffU, static_cast<int>(last), 0) == 0) return;
  if (thread == 0) move_on(state, epoch, p.sends != 0, true);
  publish_completed(buffer, epoch, s.peers, 32);
  if (thread == 0) post_completed<kElsewhere>(buffer, kOperation, p.half, epoch);
  stamp(buffer, 21);
}

template <typename T>
const void* any(Variant variant) {
  return pick(variant, &combine_kernel<T, Variant::kPlain>, &combine_kernel<T, Variant::kElsewhere>,
              &combine_kernel<T, Variant::kWatched>,
              &combine_kernel<T, Variant::kWatchedElsewhere>);
}

}  // namespace

const void* combine_kernel_for(DType dtype, Variant variant) {
  switch (dtype) {
    case DType::kBFloat16:
      return any<__nv_bfloat16>(variant);
    case DType::kFloat16:
      return any<__half>(variant);
    default:
      return any<float>(variant);
  }
}

bool is_combine_kernel(const void* kernel) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const Variant variant : kVariants) {
      if (kernel == combine_kernel_for(dtype, variant)) return true;
    }
  }
  return false;
}

std::int64_t combine_shared_bytes(int num_ranks) {
  return CombineShared(nowhere(), num_ranks).size_bytes;
}

}  // namespace tandem::cuda
