// Schedules of faults drawn at random, for minutes.
#include <gtest/gtest.h>

#include "faults/schedule.h"

namespace tandem::test {
namespace {

TEST(LongSchedule, DrawnForMinutes) { run_drawn_schedules(std::chrono::seconds(120)); }

}  // namespace
}  // namespace tandem::test
