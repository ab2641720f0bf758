#include "backend/cpu/workers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tandem::cpu {
namespace {

TEST(Workers, EveryItemIsDoneOnceByAnyNumberOfThreads) {
  for (const int num_threads : {1, 2, 3, 5}) {
    Workers workers(num_threads);
    EXPECT_EQ(workers.num_threads(), num_threads);
    for (const std::int64_t num_items : {0, 1, 2, 7, 100}) {
      std::vector<int> done(num_items);
      workers.run(num_items, [&](int thread, std::int64_t first, std::int64_t last) {
        EXPECT_LT(thread, num_threads);
        for (std::int64_t item = first; item < last; ++item) ++done[item];
      });
      EXPECT_EQ(std::count(done.begin(), done.end(), 1), num_items);
    }
  }
}

TEST(Workers, TurnsFollowEachOtherWithoutLoss) {
  Workers workers(3);
  std::vector<std::int64_t> sums(3);
  for (int turn = 0; turn < 2000; ++turn) {
    workers.run(3, [&](int, std::int64_t first, std::int64_t last) {
      for (std::int64_t item = first; item < last; ++item) sums[item] += turn;
    });
  }
  EXPECT_EQ(sums, std::vector<std::int64_t>(3, 1999 * 1000));
}

}  // namespace
}  // namespace tandem::cpu
