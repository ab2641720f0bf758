// A warp's ring of row chunks in shared memory: rows of x come in ahead of time, are converted to
// the wire format, and go out to each destination. Read once, written K times. Warps work on their
// own: no barrier of the block is needed between chunks.
//
// On sm_90 the copy engine moves the bytes in both directions; below, and for rows of x that are
// not made of 16-byte pieces, the warp's threads do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "backend/cuda/kernel_params.h"
#include "backend/cuda/ptx/bulk.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "tandem/numeric.h"

namespace tandem::cuda {

inline constexpr int kMaxStages = 3;
inline constexpr int kMaxGroupsPerChunk = kChunkBytes / 2 / kFp8GroupSize;

__device__ __forceinline__ float2 unpack_pair(std::uint32_t bits, __nv_bfloat16) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000U)};
}
__device__ __forceinline__ float2 unpack_pair(std::uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// The floats of 16 bytes of X.
template <typename X>
__device__ __forceinline__ void unpack(const uint4& bits, float (&values)[16 / sizeof(X)]) {
  if constexpr (sizeof(X) == 4) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  } else {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair(words[i], X{});
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

// The bits of the largest magnitude among 16 bytes of X, as those of a float: they order like the
// magnitudes, NaN above all.
template <typename X>
__device__ __forceinline__ std::uint32_t largest_magnitude(const uint4& bits) {
  if constexpr (sizeof(X) == 4) {
    constexpr std::uint32_t kMagnitude = 0x7fffffffU;
    return max(max(bits.x & kMagnitude, bits.y & kMagnitude),
               max(bits.z & kMagnitude, bits.w & kMagnitude));
  } else {
    constexpr std::uint32_t kMagnitudes = 0x7fff7fffU;
    const std::uint32_t pair = __vmaxu2(__vmaxu2(bits.x & kMagnitudes, bits.y & kMagnitudes),
                                        __vmaxu2(bits.z & kMagnitudes, bits.w & kMagnitudes));
    const std::uint32_t largest = max(pair >> 16, pair & 0xffffU);
    return __float_as_uint(unpack_pair(largest, X{}).x);
  }
}

// Two floats to two e4m3 bytes, as numeric.h defines it (saturating, NaN stays NaN).
__device__ __forceinline__ std::uint32_t to_e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return static_cast<std::uint32_t>(to_float8_e4m3(low).bits) |
         (static_cast<std::uint32_t>(to_float8_e4m3(high).bits) << 8);
#endif
}

// Zero-fills up to a multiple of 16 bytes.
template <typename Element>
__device__ inline void copy_elements(std::byte* stage, const std::byte* source, int num_bytes) {
  constexpr int kSize = static_cast<int>(sizeof(Element));
  const int padded = (num_bytes + 15) / 16 * 16;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 32 * kSize; i < padded; i += 32 * kSize) {
    *reinterpret_cast<Element*>(stage + i) =
        i < num_bytes ? *reinterpret_cast<const Element*>(source + i) : Element{};
  }
}

// A warp loads a chunk into shared memory by itself, in pieces of 2, 4 or 16 bytes. Out of line: on
// the path of aligned rows it would be in the way.
static __device__ __noinline__ void load_by_threads(std::byte* stage, const std::byte* source,
                                                    int num_bytes, int piece_bytes) {
  __syncwarp();
  if (piece_bytes == 16) {
    copy_elements<uint4>(stage, source, num_bytes);
  } else if (piece_bytes == 4) {
    copy_elements<std::uint32_t>(stage, source, num_bytes);
  } else {
    copy_elements<std::uint16_t>(stage, source, num_bytes);
  }
  ptx::fence_async_shared();
  __syncwarp();
}

// A unit, as token and number within its row: chunk, and which part of the destinations.
struct UnitCursor {
  std::uint32_t unit = 0;
  std::uint32_t token = 0;
  std::uint32_t unit_in_row = 0;

  UnitCursor() = default;
  __device__ UnitCursor(std::uint32_t at, std::uint32_t per_row)
      : unit(at), token(at / per_row), unit_in_row(at - token * per_row) {}
  __device__ void advance(std::uint32_t per_row) {
    unit += kNumWarps;
    unit_in_row += kNumWarps;
    if (unit_in_row >= per_row) {
      const std::uint32_t tokens = unit_in_row / per_row;
      token += tokens;
      unit_in_row -= tokens * per_row;
    }
  }
};

// X is void for formats whose rows travel as they are.
template <typename X>
class RowRing {
 public:
  static constexpr bool kFp8 = !std::is_void_v<X>;
  static constexpr int kStages = kFp8 ? 2 : 3;

  // `storage`: kRingBytes, `barriers`: kMaxStages, `scales`: 2 * kMaxGroupsPerChunk, of this warp.
  __device__ RowRing(const DispatchParams& params, std::byte* storage, std::uint64_t* barriers,
                     float* scales)
      : params_(params),
        storage_(storage),
        barriers_(barriers),
        scales_(scales),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_bytes_(params.row.hidden * params.x_element_bytes),
        policy_(ptx::line_policy(params.exceeds_cache != 0)) {}

  __device__ void init() {
    if (ptx::kHasBulk) {
      if (lane_ == 0) {
        for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(&barriers_[stage], 1);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
    }
  }

  // This warp's units are `first`, + kNumWarps, ... below end. Starts loading the first one: all at
  // once would keep what the block needs sooner waiting.
  __device__ void begin(const UnitCursor& first, std::uint32_t end) {
    end_ = end;
    next_ = first;
    next_load_ = next_;
    load_next();
  }

  // Starts loading as many more as there is room for.
  __device__ void prefetch() {
#pragma unroll 1
    for (int stage = 1; stage < kStages; ++stage) load_next();
  }

  // Sends the units below `tile_end`. destinations[(token - first_token) * topk + k]: the row's
  // address on its owner, or null.
  __device__ void send(std::uint32_t tile_end, std::uint32_t first_token,
                       std::byte* const* destinations) {
#pragma unroll 1
    for (; next_.unit < tile_end; next_.advance(params_.units_per_row)) {
      const int offset =
          static_cast<int>(next_.unit_in_row >> params_.log_parts) * params_.chunk_bytes;
      const int num_bytes = min(params_.chunk_bytes, row_bytes_ - offset);
      std::byte* stage = storage_ + sent_stage_ * kChunkBytes;
      if (loads_in_bulk()) ptx::mbarrier_wait(&barriers_[sent_stage_], (sent_ / kStages) & 1U);
      // This unit's part of the destinations: every 2^log_parts-th, from `first_k`.
      const int first_k = static_cast<int>(next_.unit_in_row & ((1U << params_.log_parts) - 1));
      std::byte* const* row_destinations =
          destinations + (next_.token - first_token) * params_.topk;
      if constexpr (kFp8) {
        std::byte* out = storage_ + 2 * kChunkBytes + sent_ % 2 * (kChunkBytes / 2);
        float* scales = scales_ + sent_ % 2 * kMaxGroupsPerChunk;
        ptx::bulk_wait_read<1>();  // the chunk before last has left `out`
        __syncwarp();
        quantise(stage, num_bytes, out, scales);
        ptx::fence_async_shared();
        __syncwarp();
        load_next();
        const int channels = num_bytes / static_cast<int>(sizeof(X));
        const int channel = offset / static_cast<int>(sizeof(X));
        store(out, (channels + 15) / 16 * 16, row_destinations, first_k, channel);
        store_scales(scales, channel / kFp8GroupSize, layout::num_fp8_groups(channels),
                     row_destinations, first_k);
      } else {
        store(stage, (num_bytes + 15) / 16 * 16, row_destinations, first_k, offset);
        // The stage of the chunk before this one is free once that has been read.
        if (sent_ > 0 && next_load_.unit < end_) {
          ptx::bulk_wait_read<1>();
          __syncwarp();
          load_next();
        }
      }
      ++sent_;
      sent_stage_ = sent_stage_ + 1 == kStages ? 0 : sent_stage_ + 1;
    }
  }

  // Until everything sent is complete and nothing is on its way into shared memory.
  __device__ void finish() {
    if (loads_in_bulk()) {
      for (; sent_ < loaded_; ++sent_) {  // after an error: loaded, not sent
        ptx::mbarrier_wait(&barriers_[sent_ % kStages], (sent_ / kStages) & 1U);
      }
    }
    ptx::bulk_wait_all();
  }

 private:
  __device__ bool loads_in_bulk() const { return ptx::kHasBulk && params_.x_aligned != 0; }

  __device__ void load_next() {
    if (next_load_.unit >= end_) return;
    const int offset =
        static_cast<int>(next_load_.unit_in_row >> params_.log_parts) * params_.chunk_bytes;
    const int num_bytes = min(params_.chunk_bytes, row_bytes_ - offset);
    const std::byte* source = params_.x + next_load_.token * params_.x_pitch + offset;
    const std::uint32_t number = loaded_ % kStages;
    std::byte* stage = storage_ + number * kChunkBytes;
    if (loads_in_bulk()) {
      if (lane_ == 0) {
        ptx::bulk_load(stage, source, static_cast<std::uint32_t>(num_bytes), &barriers_[number]);
      }
    } else {
      load_by_threads(stage, source, num_bytes,
                      params_.x_aligned != 0 ? 16 : params_.x_element_bytes);
    }
    ++loaded_;
    next_load_.advance(params_.units_per_row);
  }

  __device__ void store(const std::byte* chunk, int num_bytes, std::byte* const* destinations,
                        int first_k, int offset) const {
    if (ptx::kHasBulk) {
      for (int k = first_k + (lane_ << params_.log_parts); k < params_.topk;
           k += 32 << params_.log_parts) {
        if (destinations[k] != nullptr) {
          ptx::bulk_store(destinations[k] + offset, chunk, static_cast<std::uint32_t>(num_bytes),
                          policy_);
        }
      }
      ptx::bulk_commit();
    } else {
      for (int k = first_k; k < params_.topk; k += 1 << params_.log_parts) {
        if (destinations[k] == nullptr) continue;
        for (int i = lane_ * 16; i < num_bytes; i += 32 * 16) {
          ptx::store_once(destinations[k] + offset + i, *reinterpret_cast<const uint4*>(chunk + i));
        }
      }
      __syncwarp();
    }
  }

  // numeric.h's fp8_scale and to_float8_e4m3. A lane takes every 32nd vector of 16 bytes, four in
  // all; a group of 128 channels is one of these of 16 neighbouring lanes (32 for float32).
  __device__ void quantise(const std::byte* chunk, int num_bytes, std::byte* out,
                           float* scales) const {
    if constexpr (kFp8) {
      constexpr int kVector = 16 / static_cast<int>(sizeof(X));
      constexpr int kLanesPerGroup = kFp8GroupSize / kVector;
      constexpr int kVectors = 4;
      static_assert(kVectors * 32 * 16 == kChunkBytes);
      const int channels = num_bytes / static_cast<int>(sizeof(X));
      const int out_bytes = static_cast<int>(layout::round_up(channels, 16));
      const int in_bytes = static_cast<int>(layout::round_up(num_bytes, 16));
      uint4 bits[kVectors];
      std::uint32_t largest[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int at = (j * 32 + lane_) * 16;
        bits[j] = at < in_bytes ? *reinterpret_cast<const uint4*>(chunk + at) : uint4{0, 0, 0, 0};
        largest[j] = largest_magnitude<X>(bits[j]);
      }
      // The lanes of a group share its four maxima out: two exchanges leave each with one of them,
      // the rest are of that one. So a lane works out one scale, not four.
      const bool odd = (lane_ & 1) != 0;
      const bool upper = (lane_ & 2) != 0;
      const auto exchange = [](std::uint32_t kept, std::uint32_t given, int step) {
        return max(kept, __shfl_xor_sync(0xffffffffU, given, step));
      };
      const std::uint32_t even_half =
          exchange(odd ? largest[2] : largest[0], odd ? largest[0] : largest[2], 1);
      const std::uint32_t odd_half =
          exchange(odd ? largest[3] : largest[1], odd ? largest[1] : largest[3], 1);
      std::uint32_t amax = exchange(upper ? odd_half : even_half, upper ? even_half : odd_half, 2);
#pragma unroll
      for (int step = 4; step < kLanesPerGroup; step *= 2) amax = exchange(amax, amax, step);
      const Fp8Scale scale = fp8_scale(__uint_as_float(amax), params_.row.format);
      const int vector = (odd ? 2 : 0) + (upper ? 1 : 0);
      const int group = vector * (32 / kLanesPerGroup) + lane_ / kLanesPerGroup;
      if (lane_ % kLanesPerGroup < kVectors && group < layout::num_fp8_groups(channels)) {
        scales[group] = scale.dequantise;
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int holder = (lane_ & ~3) | (j / 2) | ((j % 2) * 2);
        const float factor = __shfl_sync(0xffffffffU, scale.quantise, holder);
        float values[kVector];
        unpack<X>(bits[j], values);
        std::uint32_t packed[kVector / 4];
#pragma unroll
        for (int i = 0; i < kVector / 4; ++i) {
          packed[i] =
              to_e4m3_pair(__fmul_rn(values[4 * i], factor), __fmul_rn(values[4 * i + 1], factor)) |
              (to_e4m3_pair(__fmul_rn(values[4 * i + 2], factor),
                            __fmul_rn(values[4 * i + 3], factor))
               << 16);
        }
        const int at = (j * 32 + lane_) * kVector;
        if (at >= out_bytes) continue;
        if constexpr (kVector == 8) {
          *reinterpret_cast<uint2*>(out + at) = {packed[0], packed[1]};
        } else {
          *reinterpret_cast<std::uint32_t*>(out + at) = packed[0];
        }
      }
    }
  }

  // A chunk of fp8 begins at a multiple of four groups, so UE8M0 words are whole.
  __device__ void store_scales(const float* scales, int first_group, int groups,
                               std::byte* const* destinations, int first_k) const {
    const std::int64_t offset = params_.row.scales_offset();
    const bool packs = params_.row.format == Format::kFp8Ue8m0;
    // Eight lanes to a destination: as many as a chunk has groups.
    const int group = lane_ % kMaxGroupsPerChunk;
    for (int k = first_k + ((lane_ / kMaxGroupsPerChunk) << params_.log_parts); k < params_.topk;
         k += (32 / kMaxGroupsPerChunk) << params_.log_parts) {
      if (destinations[k] == nullptr) continue;
      std::byte* const row = destinations[k] + offset;
      if (!packs) {
        if (group < groups) reinterpret_cast<float*>(row)[first_group + group] = scales[group];
      } else if (group % 4 == 0 && group < groups) {
        std::uint32_t packed = 0;
        for (int byte = 0; byte < 4 && group + byte < groups; ++byte) {
          packed |= static_cast<std::uint32_t>(to_ue8m0(scales[group + byte])) << (8 * byte);
        }
        reinterpret_cast<std::uint32_t*>(row)[(first_group + group) / 4] = packed;
      }
    }
  }

  const DispatchParams& params_;
  std::byte* storage_;
  std::uint64_t* barriers_;
  float* scales_;
  int lane_;
  int row_bytes_;
  std::uint64_t policy_;
  UnitCursor next_;       // unit to send
  UnitCursor next_load_;  // unit to load
  std::uint32_t end_ = 0;
  std::uint32_t sent_ = 0;
  std::uint32_t sent_stage_ = 0;  // sent_ % kStages
  std::uint32_t loaded_ = 0;
};

}  // namespace tandem::cuda
