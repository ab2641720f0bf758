// Lists of parcels from other hosts: one is refused, or its rows go to the places that the counts
// give to their source, each once.
#include <algorithm>
#include <vector>

#include "core/parcel.h"
#include "core/receive_plan.h"
#include "fuzz/check.h"
#include "layout/parcel.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tandem;  // NOLINT
  using fuzz::check;
  FuzzedDataProvider data(bytes, size);
  const int num_ranks = data.ConsumeIntegralInRange(1, 3);
  const int num_experts = data.ConsumeIntegralInRange(1, 6);
  const core::ExpertMap experts = core::ExpertMap::contiguous(num_experts, num_ranks);
  const core::ParcelShape shape{.max_tokens = data.ConsumeIntegralInRange(1, 4),
                                .topk = data.ConsumeIntegralInRange(1, 3),
                                .has_weights = data.ConsumeBool(),
                                .source = data.ConsumeIntegralInRange(0, num_ranks - 1),
                                .rank = data.ConsumeIntegralInRange(0, num_ranks - 1)};

  // What an honest source would send, and then anything.
  const std::int32_t num_rows = data.ConsumeIntegralInRange(0, shape.max_tokens);
  std::vector<std::int32_t> list{num_rows, 0};
  std::vector<std::int32_t> counts(static_cast<std::size_t>(num_ranks) * num_experts);
  for (std::int32_t row = 0; row < num_rows; ++row) {
    list.push_back(row);
    for (std::int32_t k = 0; k < shape.topk; ++k) {
      list.push_back(data.ConsumeIntegralInRange(-1, num_experts - 1));
      if (list.back() >= 0) ++counts[shape.source * num_experts + list.back()];
    }
    if (shape.has_weights) list.resize(list.size() + static_cast<std::size_t>(shape.topk), row);
  }
  list.resize(static_cast<std::size_t>(
      layout::Parcel::entry(shape.max_tokens, shape.topk, shape.has_weights)));
  const int num_lies = data.ConsumeIntegralInRange(0, 3);
  for (int i = 0; i < num_lies; ++i) {
    std::int32_t& number = list[data.ConsumeIntegralInRange<std::size_t>(0, list.size() - 1)];
    number = fuzz::awkward<std::int32_t>(data, number);
  }
  for (std::int32_t& count : counts) count += data.ConsumeIntegralInRange(0, 7) == 0;

  const auto num_local = static_cast<std::size_t>(experts.num_local(shape.rank));
  std::vector<std::int64_t> begin(num_experts);
  std::vector<std::int32_t> received(num_local);
  std::vector<std::int64_t> offsets(num_local + 1);
  std::vector<std::int64_t> ranges(num_local * num_ranks);
  if (core::plan_rows(counts, experts,
                      {.layout = data.ConsumeBool() ? Layout::kPadded : Layout::kPacked,
                       .max_tokens = shape.max_tokens,
                       .topk = shape.topk,
                       .row_alignment = 2,
                       .capacity_rows = 1000},
                      shape.rank, begin, {received, offsets, ranges})) {
    return 0;
  }
  core::ParcelPlaces found;
  // On the heap, whose ends the sanitizer guards.
  if (!core::find_places(list, shape, experts, {offsets, ranges}, found)) return 0;

  check(found.first.size() == found.tokens.size() + 1, "each row has places");
  const auto num_found = static_cast<std::int64_t>(found.tokens.size());
  check(num_found <= shape.max_tokens, "rows have room");
  check(found.first_part >= 0 &&
            found.first_part + num_found <= std::int64_t{shape.max_tokens} * shape.topk,
        "parts have room");
  check(found.weights.size() == (shape.has_weights ? found.places.size() : 0),
        "each place has a weight or none has");
  for (std::size_t row = 0; row < found.tokens.size(); ++row) {
    check(found.tokens[row] >= 0 && found.tokens[row] < shape.max_tokens, "tokens are of the call");
    const std::int64_t num_places = found.first[row + 1] - found.first[row];
    check(num_places >= 1 && num_places <= shape.topk, "a row has 1 to K places");
  }
  std::vector<std::int64_t> expected;
  for (std::size_t local = 0; local < num_local; ++local) {
    const std::int64_t range = ranges[local * num_ranks + shape.source];
    for (std::int64_t i = 0; i < (range & 0xffffffff); ++i) {
      expected.push_back(offsets[local] + (range >> 32) + i);
    }
  }
  std::sort(found.places.begin(), found.places.end());
  check(found.places == expected, "rows go to the places of their source, each once");
  return 0;
}
