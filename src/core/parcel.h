// What a receiver makes of a parcel (layout/parcel.h): the places of its rows. They follow from the
// list and the counts; the list may say anything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/expert_map.h"

namespace tandem::core {

// Of the dispatch, its source and this rank.
struct ParcelShape {
  std::int32_t max_tokens = 1;  // M of the call
  std::int32_t topk = 1;
  bool has_weights = false;
  int source = 0;
  int rank = 0;
};

// What plan_rows has found for this rank.
struct ExpectedRows {
  std::span<const std::int64_t> offsets;  // [L + 1]
  std::span<const std::int64_t> ranges;   // [L, R]
};

struct ParcelPlaces {
  std::vector<std::int32_t> tokens;  // [rows]
  std::vector<std::int64_t> places;  // of all rows, one after the other: rows of this rank's result
  std::vector<float> weights;        // of each place, if the list has them
  std::vector<std::int64_t> first;   // [rows + 1]: a row's first place in `places`
  std::int64_t first_part = 0;       // row of the source's landing memory
  std::vector<std::int64_t> next;    // [L] scratch
};

// Finds for each row of the list its places, in the order of its token's top-k. `list` has the
// length of the longest list; each number in it is read once. False: it contradicts the counts, or
// names what there is not, or a row without a place; then `found` is undefined. Otherwise the
// places are, each once, those that the counts give to the source, and parts have room in M * K
// rows.
[[nodiscard]] bool find_places(std::span<const std::int32_t> list, const ParcelShape& shape,
                               const ExpertMap& experts, const ExpectedRows& expected,
                               ParcelPlaces& found);

}  // namespace tandem::core
