// The 64-bit words that ranks write into each other's control regions. Every word carries the epoch
// of its operation in the high half, so a stale word is never taken for a fresh one and nothing is
// zeroed. Epochs are 32 bits wide here and wrap; ranks are at most two operations apart, so
// comparing differences is safe.
//
//   word       | 63..32 | 31..29    | 28   | 27..0
//   header     | epoch  | operation | half | hash of the arguments that must agree
//   argument   | epoch  | 32 bits of an argument (see Argument)
//   count      | epoch  | rows
//   arrived    | epoch  | 0
//   completed  | epoch  | 0
//   roster     | epoch  | GPU: masked, pending, lost (see takes_part)
//   stop       | number of a view | GPU: 1 once operations are to stop until a later one
//   at work    | 0 | GPU: blocks of the rank's kernels that are at work, halted (see kHalted)
// A combine's header is its `ready` word: it is published after the outputs are in place.
#pragma once

#include <cstdint>

#include "tandem/types.h"

namespace tandem::layout {

using Word = std::uint64_t;
using Epoch = std::uint32_t;

TANDEM_HOST_DEVICE constexpr Word make_word(Epoch epoch, std::uint32_t value) {
  return (static_cast<Word>(epoch) << 32) | value;
}
TANDEM_HOST_DEVICE constexpr Epoch epoch_of(Word word) { return static_cast<Epoch>(word >> 32); }
TANDEM_HOST_DEVICE constexpr std::uint32_t value_of(Word word) {
  return static_cast<std::uint32_t>(word);
}

// Is `seen` at or after `wanted`, across the wrap?
TANDEM_HOST_DEVICE constexpr bool has_reached(Epoch seen, Epoch wanted) {
  return static_cast<std::int32_t>(seen - wanted) >= 0;
}

// Which of the two sets of control words, and which landing half, an epoch uses.
TANDEM_HOST_DEVICE constexpr int parity(Epoch epoch) { return static_cast<int>(epoch & 1U); }

// A roster word says of one rank since when it takes part, or takes part no more. While it is
// pending, the opposite holds before its epoch; later it holds whatever the distance, so that it
// may grow old.
inline constexpr std::uint32_t kRosterMasked = 1;
inline constexpr std::uint32_t kRosterPending = 2;
// It is masked since others missed it, and what it has not announced by now it never will: whoever
// waits for it goes on without (roster.cuh).
inline constexpr std::uint32_t kRosterLost = 4;

TANDEM_HOST_DEVICE constexpr bool takes_part(Word roster, Epoch epoch) {
  const bool masked = (value_of(roster) & kRosterMasked) != 0;
  const bool pending = (value_of(roster) & kRosterPending) != 0;
  return pending && !has_reached(epoch, epoch_of(roster)) ? masked : !masked;
}

// Nobody looks at operations before its epoch any more once a rank has begun this one: all have
// completed the one three before it.
TANDEM_HOST_DEVICE constexpr bool has_settled(Word roster, Epoch epoch) {
  return (value_of(roster) & kRosterPending) == 0 || has_reached(epoch, epoch_of(roster) + 2);
}
TANDEM_HOST_DEVICE constexpr Word settled(Word roster) {
  return roster & ~static_cast<Word>(kRosterPending);
}

// Of the word `at work`: no block that counts itself in from now on does anything. Hosts, also
// those of other ranks, write the top byte of the value alone, while blocks count in the others.
inline constexpr std::uint32_t kHalted = 1U << 24;

inline constexpr std::uint32_t kHashMask = (1U << 28) - 1;

struct Header {
  Operation operation = Operation::kNone;
  int half = 0;
  std::uint32_t hash = 0;  // of 28 bits
};

TANDEM_HOST_DEVICE constexpr std::uint32_t encode(Header header) {
  return (static_cast<std::uint32_t>(header.operation) << 29) |
         (static_cast<std::uint32_t>(header.half) << 28) | (header.hash & kHashMask);
}

TANDEM_HOST_DEVICE constexpr Header decode_header(std::uint32_t value) {
  return {static_cast<Operation>(value >> 29), static_cast<int>((value >> 28) & 1U),
          value & kHashMask};
}

// Arguments that must agree, published beside the header so that a mismatch can be reported with
// both values. `kShape` packs hidden (17 bits), top-k (7), format or dtype (3), placement (2),
// layout (1), partial sums (1).
enum class Argument : int {
  kMaxTokens = 0,  // M of the call (dispatch); epoch of the handle's dispatch (combine)
  kShape = 1,
  kAlignment = 2,  // dispatch, packed layout; 0 otherwise
};
inline constexpr int kNumArguments = 3;

struct ShapeArgument {
  std::int32_t hidden = 0;
  std::int32_t topk = 0;
  std::uint32_t element = 0;  // Format of a dispatch, DType of a combine
  Placement placement = Placement::kAutomatic;
  Layout layout = Layout::kPadded;
  bool partial_sums = false;  // weights travel with tokens
};

TANDEM_HOST_DEVICE constexpr std::uint32_t encode(const ShapeArgument& shape) {
  return static_cast<std::uint32_t>(shape.hidden) | (static_cast<std::uint32_t>(shape.topk) << 17) |
         (shape.element << 24) | (static_cast<std::uint32_t>(shape.placement) << 27) |
         (static_cast<std::uint32_t>(shape.layout) << 29) |
         (static_cast<std::uint32_t>(shape.partial_sums) << 30);
}

TANDEM_HOST_DEVICE constexpr ShapeArgument decode_shape(std::uint32_t value) {
  return {static_cast<std::int32_t>(value & 0x1ffffU),
          static_cast<std::int32_t>((value >> 17) & 0x7fU),
          (value >> 24) & 0x7U,
          static_cast<Placement>((value >> 27) & 0x3U),
          static_cast<Layout>((value >> 29) & 0x1U),
          ((value >> 30) & 0x1U) != 0};
}

// 28-bit hash of the arguments (a 32-bit multiplicative mix of each, folded).
TANDEM_HOST_DEVICE constexpr std::uint32_t hash_arguments(
    const std::uint32_t (&arguments)[kNumArguments]) {
  std::uint32_t hash = 0x9e3779b9U;
  for (const std::uint32_t argument : arguments) {
    hash = (hash ^ argument) * 0x85ebca6bU;
    hash ^= hash >> 15;
  }
  return hash & kHashMask;
}

}  // namespace tandem::layout
