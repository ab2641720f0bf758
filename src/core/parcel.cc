#include "core/parcel.h"

#include <bit>

#include "layout/parcel.h"

namespace tandem::core {

bool find_places(std::span<const std::int32_t> list, const ParcelShape& shape,
                 const ExpertMap& experts, const ExpectedRows& expected, ParcelPlaces& found) {
  const std::int32_t num_rows = list[0];
  if (num_rows < 0 || num_rows > shape.max_tokens) return false;
  found.first_part = list[1];
  const std::int64_t most_parts = std::int64_t{shape.max_tokens} * shape.topk;
  if (found.first_part < 0 || found.first_part > most_parts - num_rows) return false;
  const int num_local = experts.num_local(shape.rank);
  const auto range = [&](int local) {
    return expected.ranges[std::int64_t{local} * experts.num_ranks() + shape.source];
  };
  const auto begin = [&](int local) { return expected.offsets[local] + (range(local) >> 32); };
  const auto end = [&](int local) { return begin(local) + (range(local) & 0xffffffff); };

  found.tokens.clear();
  found.places.clear();
  found.weights.clear();
  found.first.assign(1, 0);
  found.next.clear();
  for (int local = 0; local < num_local; ++local) found.next.push_back(begin(local));
  for (std::int32_t row = 0; row < num_rows; ++row) {
    const std::int32_t* const entry =
        &list[layout::Parcel::entry(row, shape.topk, shape.has_weights)];
    const std::int32_t token = entry[0];
    if (token < 0 || token >= shape.max_tokens) return false;
    for (std::int32_t k = 0; k < shape.topk; ++k) {
      const std::int32_t expert = entry[1 + k];
      if (expert >= experts.num_experts()) return false;
      if (expert < 0 || experts.owner(expert) != shape.rank) continue;
      found.places.push_back(found.next[experts.local_index(expert)]++);
      if (shape.has_weights)
        found.weights.push_back(std::bit_cast<float>(entry[1 + shape.topk + k]));
    }
    if (static_cast<std::int64_t>(found.places.size()) == found.first.back()) return false;
    found.tokens.push_back(token);
    found.first.push_back(static_cast<std::int64_t>(found.places.size()));
  }
  for (int local = 0; local < num_local; ++local) {
    if (found.next[local] != end(local)) return false;
  }
  return true;
}

}  // namespace tandem::core
