#include "core/expert_map.h"

#include <algorithm>
#include <string>

#include "tandem/error.h"

namespace tandem::core {

ExpertMap ExpertMap::contiguous(int num_experts, int num_ranks) {
  std::vector<int> owners;
  owners.reserve(num_experts);
  for (int rank = 0; rank < num_ranks; ++rank) {
    owners.insert(owners.end(), num_experts / num_ranks + (rank < num_experts % num_ranks ? 1 : 0),
                  rank);
  }
  return from_owners(owners, num_ranks);
}

ExpertMap ExpertMap::from_owners(std::span<const int> owners, int num_ranks) {
  ExpertMap map;
  map.owner_.assign(owners.begin(), owners.end());
  map.local_index_.resize(owners.size());
  map.by_rank_.resize(owners.size());
  map.first_.assign(num_ranks + 1, 0);
  for (std::size_t expert = 0; expert < owners.size(); ++expert) {
    const int owner = owners[expert];
    if (owner < 0 || owner >= num_ranks) {
      throw Error(ErrorCode::kInvalidArgument, "expert_owners[" + std::to_string(expert) + "] is " +
                                                   std::to_string(owner) + ", must be in [0, " +
                                                   std::to_string(num_ranks) + ")");
    }
    map.local_index_[expert] = map.first_[owner + 1]++;
  }
  map.max_local_ = num_ranks > 0 ? *std::max_element(map.first_.begin() + 1, map.first_.end()) : 0;
  for (int rank = 0; rank < num_ranks; ++rank) map.first_[rank + 1] += map.first_[rank];
  for (std::size_t expert = 0; expert < owners.size(); ++expert) {
    map.by_rank_[map.first_[owners[expert]] + map.local_index_[expert]] =
        static_cast<std::int32_t>(expert);
  }
  return map;
}

}  // namespace tandem::core
