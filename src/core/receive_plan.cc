#include "core/receive_plan.h"

namespace tandem::core {

std::optional<Excess> plan_rows(CountMatrix counts, const ExpertMap& experts,
                                const ReceiveShape& shape, int rank, std::span<std::int64_t> begin,
                                const ReceivedRows& received) {
  const int num_ranks = experts.num_ranks();
  const int num_experts = experts.num_experts();
  const std::int64_t padded_rows = std::int64_t{num_ranks} * shape.max_tokens;
  const bool padded = shape.layout == Layout::kPadded;

  for (int owner = 0; owner < num_ranks; ++owner) {
    std::int64_t next = 0;  // first free row of the owner
    int local = 0;
    for (const std::int32_t expert : experts.experts_of(owner)) {
      const std::int64_t first = next;
      std::int64_t row = first;
      for (int source = 0; source < num_ranks; ++source) {
        const std::int64_t count = counts[std::int64_t{source} * num_experts + expert];
        if (source == rank) begin[expert] = row;
        if (owner == rank) {
          received.ranges[std::int64_t{local} * num_ranks + source] =
              make_range(row - first, count);
        }
        row += count;
      }
      if (padded && row - first > padded_rows) {
        return Excess{.rank = owner, .expert = expert, .rows = row - first, .limit = padded_rows};
      }
      if (owner == rank) {
        received.counts[local] = static_cast<std::int32_t>(row - first);
        received.offsets[local] = first;
      }
      next = padded ? first + padded_rows : layout::round_up(row, shape.row_alignment);
      ++local;
    }
    if (next > shape.capacity_rows) {
      return Excess{.rank = owner, .rows = next, .limit = shape.capacity_rows};
    }
    if (owner == rank) received.offsets[local] = next;
  }
  return std::nullopt;
}

std::optional<Excess> plan_landing(std::span<const std::int32_t> source_counts,
                                   const ExpertMap& experts, const ReceiveShape& shape, int source,
                                   std::span<std::int64_t> begin) {
  for (int owner = 0; owner < experts.num_ranks(); ++owner) {
    const std::int64_t limit =
        rows_per_source(shape.max_tokens, shape.topk, experts.num_local(owner));
    const std::int64_t first = source * limit;
    std::int64_t row = first;
    for (const std::int32_t expert : experts.experts_of(owner)) {
      begin[expert] = row;
      row += source_counts[expert];
    }
    if (row - first > limit) {
      return Excess{.rank = owner, .source = source, .rows = row - first, .limit = limit};
    }
  }
  return std::nullopt;
}

}  // namespace tandem::core
