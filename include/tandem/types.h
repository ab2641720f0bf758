// The vocabulary of the public interface: data types, wire formats, placements, layouts, backends.
// Every enumerator's number is part of the wire format (docs/wire_format.md) and never changes.
#pragma once

#include <cstdint>
#include <string_view>

// Functions that host and device code share. Expands to nothing where no CUDA compiler is at work.
#if defined(__CUDACC__)
#define TANDEM_HOST_DEVICE __host__ __device__
#else
#define TANDEM_HOST_DEVICE
#endif

namespace tandem {

// Element type of a tensor.
enum class DType : std::uint8_t {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFloat8E4M3 = 3,  // the "fn" variant: no infinities, largest value 448
  kInt32 = 4,
  kInt64 = 5,
};

// What a dispatched row looks like on the wire and in the receiver's view.
//   kBFloat16, kFloat16, kFloat32: the row as it is; x must have that dtype.
//   kFp8:      e4m3 with one float32 scale per 128 channels; x may be bf16, fp16 or fp32.
//   kFp8Pow2:  the same with each scale rounded up to a power of two.
//   kFp8Ue8m0: as kFp8Pow2 with the scales as UE8M0 bytes, four packed into an int32.
enum class Format : std::uint8_t {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFp8 = 3,
  kFp8Pow2 = 4,
  kFp8Ue8m0 = 5,
};

// How a dispatched row finds its place.
//   kPacked:  senders wait for the counts of all ranks and write each row to its final place; the
//             receiver gets a view and copies nothing. Not with a hook.
//   kSlotted: senders do not wait; the receive phase copies rows into the caller's tensor.
//   kAutomatic: kSlotted with a hook, kPacked without one.
enum class Placement : std::uint8_t { kAutomatic = 0, kPacked = 1, kSlotted = 2 };

// The shape of what dispatch hands to the experts (L local experts, R ranks, M max tokens per
// rank).
//   kPadded: [L, R * M, H]; expert l owns rows l * R * M onwards, `counts[l]` of them are valid.
//   kPacked: [rows, H]; experts one after the other, each start rounded up to `row_alignment`.
// In both, an expert's rows are ordered by source rank, then token, then position in the top-k.
enum class Layout : std::uint8_t { kPadded = 0, kPacked = 1 };

enum class Backend : std::uint8_t { kCpu = 0, kCuda = 1 };

// What becomes of an operation in which a rank does not come within the timeout, or has ended.
//   kFail: it fails on every rank; recover() makes a new start.
//   kMask: the rank is masked, and the operation ends without it.
enum class OnTimeout : std::uint8_t { kFail = 0, kMask = 1 };

// The two collective operations, and none (in errors of set-up and bookkeeping).
enum class Operation : std::uint8_t { kNone = 0, kDispatch = 1, kCombine = 2 };

// Where an operation stood when something went wrong.
enum class Phase : std::uint8_t {
  kNone = 0,
  kSetup = 1,        // rendezvous, making a buffer
  kEnter = 2,        // waiting until every peer has completed the operation before last
  kHeader = 3,       // waiting for a peer's header and counts
  kRows = 4,         // waiting for a peer's rows (dispatch: arrived)
  kReady = 5,        // waiting for a peer's expert outputs (combine: ready)
  kCombineHalf = 6,  // waiting until peers have read the half of the combine region to be reused
  kMembership = 7    // waiting for peers to take note of who takes part, or to recover
};

inline constexpr int kMaxHidden = 65536;  // channels; also bounds a row to 256 KiB
inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxRanks = 1024;
inline constexpr int kFp8GroupSize = 128;      // channels that share one scale
inline constexpr float kFp8Max = 448.0F;       // largest finite e4m3fn value
inline constexpr float kFp8AmaxFloor = 1e-4F;  // groups quieter than this share one scale

TANDEM_HOST_DEVICE constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat8E4M3:
      return 1;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

TANDEM_HOST_DEVICE constexpr bool is_fp8(Format format) { return format >= Format::kFp8; }

// Element type of a dispatched row's values.
TANDEM_HOST_DEVICE constexpr DType value_dtype(Format format) {
  return is_fp8(format) ? DType::kFloat8E4M3 : static_cast<DType>(format);
}

TANDEM_HOST_DEVICE constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat32; }

// Names as the command line and the JSON output spell them ("bf16", "fp8-ue8m0", "packed", ...).
std::string_view name(DType dtype);
std::string_view name(Format format);
std::string_view name(Placement placement);
std::string_view name(Layout layout);
std::string_view name(Backend backend);
std::string_view name(OnTimeout on_timeout);
std::string_view name(Operation operation);
std::string_view name(Phase phase);

}  // namespace tandem
