// Which rank owns which expert, and under which local number.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem::core {

class ExpertMap {
 public:
  ExpertMap() = default;

  // As even as possible: the first num_experts % num_ranks ranks own one expert more.
  static ExpertMap contiguous(int num_experts, int num_ranks);

  // owners[e] is the rank of expert e. Throws kInvalidArgument for a rank outside [0, num_ranks).
  static ExpertMap from_owners(std::span<const int> owners, int num_ranks);

  [[nodiscard]] int num_experts() const { return static_cast<int>(owner_.size()); }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(first_.size()) - 1; }
  [[nodiscard]] int owner(int expert) const { return owner_[expert]; }
  [[nodiscard]] int local_index(int expert) const { return local_index_[expert]; }
  [[nodiscard]] int num_local(int rank) const { return first_[rank + 1] - first_[rank]; }
  [[nodiscard]] int max_local() const { return max_local_; }

  // Ids of a rank's experts, ascending; the position is the local number.
  [[nodiscard]] std::span<const std::int32_t> experts_of(int rank) const {
    return {by_rank_.data() + first_[rank], static_cast<std::size_t>(num_local(rank))};
  }

  // All experts by (owner, local number), and where each rank's begin: for backends that copy them.
  [[nodiscard]] std::span<const std::int32_t> by_rank() const { return by_rank_; }
  [[nodiscard]] std::span<const std::int32_t> first() const { return first_; }  // [R + 1]

 private:
  std::vector<std::int32_t> owner_;        // [E]
  std::vector<std::int32_t> local_index_;  // [E]
  std::vector<std::int32_t> by_rank_;      // [E]
  std::vector<std::int32_t> first_;        // [R + 1]
  int max_local_ = 0;
};

}  // namespace tandem::core
