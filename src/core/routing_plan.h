// The sender's side of routing: which expert each selection goes to, and its stable slot there.
#pragma once

#include <cstdint>
#include <span>

#include "tandem/tensor.h"

namespace tandem::core {

// One (token, k): the slot counts the selections of the same expert before it, in token order, then
// k.
struct Selection {
  std::int32_t expert = -1;  // -1: none
  std::int32_t slot = 0;
};

// Fills selections[T * K] and counts[E] from topk_idx (int32 or int64, contiguous, validated as
// such). Returns the position of the first index >= E, or -1 if all are good; after a bad one the
// outputs are undefined.
[[nodiscard]] std::int64_t assign_slots(const ConstTensorView& topk_idx,
                                        std::span<Selection> selections,
                                        std::span<std::int32_t> counts);

}  // namespace tandem::core
