// Copies of rows between a region of symmetric memory and a caller's tensor, by warps, from one run
// of rows after another.
#pragma once

#include <cstdint>

#include "backend/cuda/block_tools.cuh"

namespace tandem::cuda {

inline constexpr int kRunsPerTile = kNumThreads;

// Runs of consecutive rows, kRunsPerTile at a time.
struct RunTile {
  std::uint32_t* first;       // [kRunsPerTile + 1]: rows of the tile before each run
  std::int64_t* source;       // [kRunsPerTile]: first row on the one side
  std::int64_t* destination;  // and on the other
  std::uint32_t* warp_sums;   // [kNumWarps]

  TANDEM_HOST_DEVICE explicit RunTile(SharedCarver& carver) {
    source = carver.take<std::int64_t>(kRunsPerTile);
    destination = carver.take<std::int64_t>(kRunsPerTile);
    first = carver.take<std::uint32_t>(kRunsPerTile + 1);
    warp_sums = carver.take<std::uint32_t>(kNumWarps);
  }

  // The run that holds the tile's row.
  __device__ int find(std::uint32_t row, int num_runs) const {
    int low = 0;
    int high = num_runs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

inline constexpr int kCopyChunk = 2048;  // bytes that a warp has in flight: four 16-byte accesses

// Copies one chunk of at most kCopyChunk bytes. `aligned`: 16-byte accesses are allowed, and the
// source may be read up to the next multiple of 16; `exact`: but not written beyond num_bytes.
__device__ inline void copy_chunk(std::byte* destination, const std::byte* source, int num_bytes,
                                  bool aligned, int element_bytes) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (aligned) {
    uint4 pieces[kCopyChunk / 512];
#pragma unroll
    for (int i = 0; i < kCopyChunk / 512; ++i) {
      const int at = (i * 32 + lane) * 16;
      if (at < num_bytes) pieces[i] = ptx::load_once(source + at);
    }
#pragma unroll
    for (int i = 0; i < kCopyChunk / 512; ++i) {
      const int at = (i * 32 + lane) * 16;
      if (at < num_bytes) ptx::store_once(destination + at, pieces[i]);
    }
    return;
  }
  if (element_bytes == 1) {
    for (int at = lane; at < num_bytes; at += 32) destination[at] = source[at];
  } else if (element_bytes == 2) {
    for (int at = lane * 2; at < num_bytes; at += 64) {
      *reinterpret_cast<std::uint16_t*>(destination + at) =
          *reinterpret_cast<const std::uint16_t*>(source + at);
    }
  } else {
    for (int at = lane * 4; at < num_bytes; at += 128) {
      *reinterpret_cast<std::uint32_t*>(destination + at) =
          *reinterpret_cast<const std::uint32_t*>(source + at);
    }
  }
}

// Calls copy(run, row in run, chunk) for every chunk of every row of the tile's runs, spread over
// the warps of the grid.
template <typename Copy>
__device__ inline void for_each_chunk(const RunTile& tile, int num_runs, int chunks_per_row,
                                      Copy copy) {
  const std::int64_t num_units = std::int64_t{tile.first[num_runs]} * chunks_per_row;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t unit = std::int64_t{warp} * gridDim.x + blockIdx.x; unit < num_units;
       unit += std::int64_t{gridDim.x} * kNumWarps) {
    const auto row = static_cast<std::uint32_t>(unit / chunks_per_row);
    const int chunk = static_cast<int>(unit - std::int64_t{row} * chunks_per_row);
    const int run = tile.find(row, num_runs);
    copy(run, row - tile.first[run], chunk);
  }
}

}  // namespace tandem::cuda
