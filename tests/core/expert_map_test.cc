#include "core/expert_map.h"

#include <gtest/gtest.h>

#include <vector>

#include "tandem/error.h"

namespace tandem::core {
namespace {

std::vector<int> sizes(const ExpertMap& map) {
  std::vector<int> result;
  for (int rank = 0; rank < map.num_ranks(); ++rank) result.push_back(map.num_local(rank));
  return result;
}

TEST(ExpertMap, ContiguousSplitsAsEvenlyAsPossibleFirstRanksMore) {
  EXPECT_EQ(sizes(ExpertMap::contiguous(8, 4)), (std::vector{2, 2, 2, 2}));
  EXPECT_EQ(sizes(ExpertMap::contiguous(256, 3)), (std::vector{86, 85, 85}));
  EXPECT_EQ(sizes(ExpertMap::contiguous(2, 5)), (std::vector{1, 1, 0, 0, 0}));
}

TEST(ExpertMap, ContiguousNumbersExpertsInOrder) {
  const ExpertMap map = ExpertMap::contiguous(5, 2);
  EXPECT_EQ(map.owner(2), 0);
  EXPECT_EQ(map.owner(3), 1);
  EXPECT_EQ(map.local_index(4), 1);
  EXPECT_EQ(map.max_local(), 3);
}

TEST(ExpertMap, FromOwnersNumbersLocalExpertsAscending) {
  const ExpertMap map = ExpertMap::from_owners(std::vector{2, 0, 2, 0, 2}, 3);
  EXPECT_EQ(sizes(map), (std::vector{2, 0, 3}));
  const auto last = map.experts_of(2);
  EXPECT_EQ(std::vector(last.begin(), last.end()), (std::vector<std::int32_t>{0, 2, 4}));
  EXPECT_EQ(map.local_index(3), 1);
  EXPECT_EQ(map.max_local(), 3);
  EXPECT_TRUE(map.experts_of(1).empty());
}

TEST(ExpertMap, RefusesAnOwnerThatIsNoRank) {
  for (const int owner : {-1, 3}) {
    try {
      (void)ExpertMap::from_owners(std::vector{0, owner}, 3);
      FAIL() << "accepted owner " << owner;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("expert_owners[1]"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace tandem::core
