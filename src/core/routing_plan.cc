#include "core/routing_plan.h"

#include <algorithm>

namespace tandem::core {
namespace {

template <typename Index>
std::int64_t assign(const Index* indices, std::span<Selection> selections,
                    std::span<std::int32_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  const auto num_experts = static_cast<Index>(counts.size());
  for (std::size_t i = 0; i < selections.size(); ++i) {
    const Index expert = indices[i];
    if (expert < 0) {
      selections[i] = {};
    } else if (expert < num_experts) {
      selections[i] = {static_cast<std::int32_t>(expert), counts[expert]++};
    } else {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

}  // namespace

std::int64_t assign_slots(const ConstTensorView& topk_idx, std::span<Selection> selections,
                          std::span<std::int32_t> counts) {
  return topk_idx.dtype == DType::kInt32 ? assign(topk_idx.as<std::int32_t>(), selections, counts)
                                         : assign(topk_idx.as<std::int64_t>(), selections, counts);
}

}  // namespace tandem::core
