// Control words that go astray, alone, and schedules of all kinds of faults drawn for a while.
#include <gtest/gtest.h>

#include "faults/schedule.h"
#include "faults/settings.h"

namespace tandem::test {
namespace {

class Words : public testing::TestWithParam<std::tuple<Placement, OnTimeout>> {
 protected:
  // Each kind of word, to a peer, in a pair of operations.
  void run(Kind kind) {
    for (const Point point :
         {Point::kCount, Point::kArgument, Point::kHeader, Point::kArrived, Point::kCompleted}) {
      for (const int nth : {1, 2}) {
        SCOPED_TRACE("point " + std::to_string(static_cast<int>(point)));
        run_schedule(
            {.shape = entangled(3, std::get<0>(GetParam())),
             .on_timeout = std::get<1>(GetParam()),
             .faults = {
                 {.rank = 1, .kind = kind, .point = point, .nth = nth, .peer = 2, .pause = {}}}});
      }
    }
  }
};

TEST_P(Words, MayBeLost) { run(Kind::kLoseWord); }

TEST_P(Words, MayComeAgainWhenTheyAreStale) { run(Kind::kRepeatWord); }

TEST_P(Words, MayComeInAnyOrderBeforeTheirRelease) {
  for (int seed = 0; seed < 5; ++seed) {
    Schedule schedule{.shape = entangled(3, std::get<0>(GetParam())),
                      .on_timeout = std::get<1>(GetParam())};
    schedule.shape.seed = seed;
    for (int rank = 0; rank < 3; ++rank) {
      schedule.faults.push_back({.rank = rank,
                                 .kind = Kind::kShuffleWords,
                                 .point = Point::kHeader,
                                 .nth = 100,
                                 .peer = (rank + 1) % 3,
                                 .pause = {}});
    }
    run_schedule(schedule);
  }
}

INSTANTIATE_TEST_SUITE_P(OfEveryKind, Words,
                         testing::Combine(testing::Values(Placement::kPacked, Placement::kSlotted),
                                          testing::Values(OnTimeout::kFail, OnTimeout::kMask)));

TEST(Schedule, DrawnForAWhile) { run_drawn_schedules(std::chrono::seconds(5)); }

}  // namespace
}  // namespace tandem::test
