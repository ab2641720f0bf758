// A process that stops while it joins a running buffer, or a rank that stops while another is let
// in, for longer than others wait: they miss it, and it comes back.
#include <gtest/gtest.h>

#include "faults/newcomer.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

// Gates
constexpr int kStalled = 0;  // the victim has stopped
constexpr int kGo = 1;       // it may go on
constexpr int kJoined = 3;   // the newcomer is there

struct Victim {
  int member = -1;  // -1: the newcomer
  Point point;
};

// "" or what went wrong; nothing if ranks that did nothing wrong were missed.
std::optional<std::string> try_out(const Victim& victim, std::chrono::nanoseconds timeout) {
  const Gathering gathering(timeout);
  const Common& common = gathering.common;
  const int index_of_victim = victim.member < 0 ? kNewcomer : victim.member;
  // The host itself goes on while its door's thread does not.
  const bool is_missed = victim.member != kHost;
  const Present everybody = all_but(kMembers + 1, {});
  const std::string failures = failures_of_ranks(kMembers + 1, [&](Rank& rank) {
    int pairs_without = 0;
    const auto after = [&](const Present& present) {
      for (int member = 0; member < kMembers; ++member) {
        if (!present[member] && member != index_of_victim) common.open(kStarved);
      }
      pairs_without += common.is_open(kStalled) && !present[index_of_victim] ? 1 : 0;
      if (pairs_without == 2 || (!is_missed && common.is_open(kJoined))) common.open(kGo);
      return !common.is_open(kStarved);
    };
    Script script;
    if (rank.index() == index_of_victim) {
      script.at(victim.point, 1, [&] {
        common.hit(victim.point);
        common.open(kStalled);
        common.wait(kGo);
      });
    }
    Buffer buffer = rank.index() < kMembers ? make_member(gathering, rank.index(), script)
                                            : join(gathering, kNewcomer, script);
    if (rank.index() == kNewcomer) common.open(kJoined);
    run_until(rank, buffer, gathering, everybody, after);
    common.open(kGo);  // a door's thread must be able to end
  });
  if (common.is_open(kStarved)) return {};
  return failures + (common.hits(victim.point) == 1 ? "" : "the point was not passed");
}

void expect_good(const Victim& victim) {
  SCOPED_TRACE("point " + std::to_string(static_cast<int>(victim.point)));
  // What the machine is too busy for is tried again with more time.
  for (const std::chrono::milliseconds timeout : {60ms, 300ms, 1500ms}) {
    const std::optional<std::string> failures = try_out(victim, timeout);
    if (!failures) continue;
    EXPECT_EQ(*failures, "");
    return;
  }
  ADD_FAILURE() << "ranks that did nothing wrong were missed";
}

TEST(JoinDelay, OfTheOneThatJoins) {
  for (const Setting setting : {Setting::kJoin, Setting::kMasked}) {
    for (const Point point : points_of(setting)) expect_good({.point = point});
  }
  expect_good({.point = Point::kBack});
}

TEST(JoinDelay, OfOneThatLetsItIn) {
  for (const Point point : points_of(Setting::kLetIn)) {
    expect_good({.member = kWitness, .point = point});
  }
}

TEST(JoinDelay, BehindADoor) {
  for (const Point point : points_of(Setting::kDoor)) {
    expect_good({.point = point});
    expect_good({.member = kHost, .point = point});
  }
}

}  // namespace
}  // namespace tandem::test
