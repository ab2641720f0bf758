// What the kernels are launched with: plain data, copied into the launch (and so into a captured
// graph). Everything else that they need is in device memory (state_view.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/outbox.h"
#include "backend/cuda/state_view.h"
#include "layout/block.h"
#include "layout/row.h"
#include "tandem/types.h"

namespace tandem::cuda {

// What kernels are compiled for beside the plain case: some peers are on other hosts; or hosts
// watch them, and mask ranks that miss the timeout (Watch).
enum class Variant : std::uint8_t { kPlain, kElsewhere, kWatched, kWatchedElsewhere };
constexpr bool has_elsewhere(Variant variant) {
  return variant == Variant::kElsewhere || variant == Variant::kWatchedElsewhere;
}
constexpr bool has_watch(Variant variant) {
  return variant == Variant::kWatched || variant == Variant::kWatchedElsewhere;
}
inline constexpr Variant kVariants[] = {Variant::kPlain, Variant::kElsewhere, Variant::kWatched,
                                        Variant::kWatchedElsewhere};

// A block has a multiprocessor to itself: kernels of different ranks never slow each other down by
// sharing one, and the ranks that share a GPU get equal parts of it. So every block asks for more
// than half of the shared memory (of 164 KB on an A100, 228 on an H100 or H200).
inline constexpr int kNumThreads = 512;
inline constexpr int kNumWarps = kNumThreads / 32;
// A combine with few tokens has fewer threads in a block: what all of them do at its start and end
// takes less.
inline constexpr int kLeastThreads = 256;
inline constexpr std::int64_t kLeastSharedBytes = 116 * 1024;
// Most blocks of one kernel: arrival words per source rank. Above the multiprocessors of any GPU.
inline constexpr int kMaxBlocks = 256;
// A warp's ring of row chunks in shared memory.
inline constexpr int kChunkBytes = 2048;
inline constexpr int kRingBytes = 3 * kChunkBytes;
// (token, k) entries whose destinations a block works out at a time.
inline constexpr int kTileEntries = 1024;
// Four tables of E words and what else a block shares must fit.
inline constexpr int kMaxExperts = 4096;

// Arrival words of a source: how many blocks it has; that all of them have started; then, for each
// block, that its rows are here.
inline constexpr int kNumBlocksWord = 0;
inline constexpr int kStartedWord = 1;
inline constexpr int kFirstBlockWord = 2;
inline constexpr int kNumArrivalWords = kFirstBlockWord + kMaxBlocks;

// Phase stamps per block: dispatch 0 to 8, its receive phase 9 to 13, combine 16 to 21.
inline constexpr int kTracePhases = 32;

// Where a token's k-th row lies: kept per half from dispatch to combine.
using Route = std::int64_t;  // owner << 48 | row; for slotted sends, until received: slot; -1: none
inline constexpr Route kNoRoute = -1;
inline constexpr int kRouteOwnerShift = 48;

// What kernels need for peers on other hosts. Not among the parameters themselves: longer ones make
// every launch slower.
struct RemoteView {
  Outbox layout;
  std::byte* outbox = nullptr;          // what is to be sent, in mapped memory of the host
  const std::byte* landing[2] = {};     // by parity: what comes back
  const std::uint32_t* lost = nullptr;  // [R]: not 0 for a peer that is lost
};

// Fixed for a buffer.
struct BufferView {
  layout::Block block;
  std::byte* const* blocks = nullptr;           // [R], device memory; of other hosts: the outbox
  const std::uint32_t* expert_map = nullptr;    // [E]: owner << 16 | local number
  const std::int32_t* by_rank = nullptr;        // [E]: experts by (owner, local number)
  const std::int32_t* first_of_rank = nullptr;  // [R + 1]: where each rank's begin in by_rank
  DeviceState* state = nullptr;
  ErrorRecord* record = nullptr;  // device address of host memory
  std::uint64_t timeout_ns = 0;   // ~0: none
  std::int32_t rank = 0;
  std::int32_t num_ranks = 1;
  std::int32_t num_experts = 1;
  std::int32_t across_devices = 0;
  std::uint64_t* trace = nullptr;  // phase stamps; null: none

  const RemoteView* remote = nullptr;  // in device memory; null where no peer is on another host

  // Arrays of a handle, by half.
  struct Arrays {
    std::int32_t* counts = nullptr;
    std::int64_t* offsets = nullptr;
    std::int64_t* ranges = nullptr;
    std::int32_t* source_tokens = nullptr;
    Route* routes = nullptr;  // [M, K]
  };
  Arrays arrays[2];
};

struct DispatchParams {
  BufferView buffer;
  const std::byte* x = nullptr;
  std::int64_t x_pitch = 0;  // bytes
  const void* topk_idx = nullptr;
  std::int32_t wide_indices = 0;  // int64
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  std::int32_t max_tokens = 0;
  layout::RowShape row;
  std::int32_t x_element_bytes = 2;
  std::int32_t x_aligned = 0;              // rows of x may be moved by 16-byte accesses
  std::int32_t chunk_bytes = kChunkBytes;  // of x, per unit of work
  // A unit is a chunk and a part of its destinations: 2^log_parts parts, so that few tokens keep
  // many warps busy. Units of all rows are spread over the blocks: so many each, and one more for
  // some.
  std::int32_t log_parts = 0;
  std::uint32_t units_per_row = 1;
  std::uint32_t units_per_block = 0;
  std::uint32_t blocks_with_one_more = 0;
  std::int32_t slotted = 0;
  std::int32_t padded = 0;
  std::int32_t row_alignment = 1;
  std::int32_t half = 0;
  std::uint64_t id = 0;
  std::uint32_t arguments[layout::kNumArguments] = {};
  // What kernels would have to work out while others wait for them.
  std::uint32_t arguments_hash = 0;
  std::int32_t pitch = 0;             // of `row`
  std::int32_t exceeds_cache = 0;     // L2 cannot keep all rows: other things should stay there
  std::uint32_t topk_reciprocal = 0;  // i / topk = i * this >> 20 for the entries of a tile
  // Receive phase of slotted placement.
  std::byte* recv_x = nullptr;
  std::byte* recv_scales = nullptr;
  std::int32_t recv_aligned = 0;
};

struct CombineParams {
  BufferView buffer;
  const float* weights = nullptr;
  std::byte* out = nullptr;
  std::int64_t out_pitch = 0;  // bytes
  std::int32_t out_aligned = 0;
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  std::int32_t hidden = 0;
  std::int32_t element_bytes = 2;
  std::int32_t half = 0;
  std::uint64_t dispatch_id = 0;
  std::uint32_t shape_argument = 0;
  std::uint32_t alignment_argument = 0;
  std::int32_t sends = 0;     // publish `ready` at the start
  std::int32_t receives = 0;  // gather
  // Output rows in pieces of 512 bytes, spread over the blocks: so many each, and one more for
  // some.
  std::uint32_t pieces_per_row = 1;
  std::uint32_t pieces_per_block = 0;
  std::uint32_t blocks_with_one_more = 0;
  // Staging.
  const std::byte* y = nullptr;
  std::int64_t y_pitch = 0;  // bytes
  std::int32_t y_aligned = 0;
};

}  // namespace tandem::cuda
