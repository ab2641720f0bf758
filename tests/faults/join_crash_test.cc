// A process that ends while it joins a running buffer, or a rank that ends while another is let in:
// the others go on, and the next one that joins is let in.
#include <gtest/gtest.h>

#include "faults/newcomer.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kDied = 0;  // gate

const auto kGoOn = [](const Present&) { return true; };

struct Victim {
  int member = -1;  // -1: the newcomer
  Point point;
};

// Of the world's ranks the first are members, the next is the newcomer, the last joins in its place
// if it dies.
void try_out(const Victim& victim) {
  const Gathering gathering(20s);
  const bool newcomer_dies = victim.member < 0;
  const Present rest =
      newcomer_dies ? all_but(kMembers + 1, {}) : all_but(kMembers + 1, {victim.member});
  const int index_of_victim = newcomer_dies ? kNewcomer : victim.member;
  const auto strike = [&](Rank& rank, Script& script) {
    script.at(victim.point, 1, [&gathering, &victim, &rank] {
      gathering.common.hit(victim.point);
      gathering.common.open(kDied);
      rank.die();
    });
  };
  run_ranks(kMembers + 2,
            [&](Rank& everyone) {
              Script script;
              const int index = everyone.index();
              Rank rank(everyone.communicator(), std::min(index, kNewcomer));
              if (index == index_of_victim) strike(rank, script);
              if (index < kMembers) {
                Buffer buffer = make_member(gathering, index, script);
                run_until(rank, buffer, gathering, rest, kGoOn);
              } else if (index == kNewcomer || newcomer_dies) {
                if (index > kNewcomer) gathering.common.wait(kDied);
                Buffer buffer = join(gathering, kNewcomer, script);
                run_until(rank, buffer, gathering, rest, kGoOn);
              }
              everyone.expect(rank.failures().empty(), rank.failures());
            },
            {.may_die = {index_of_victim}});
  EXPECT_EQ(gathering.common.hits(victim.point), 1) << "point " << static_cast<int>(victim.point);
}

TEST(JoinCrash, OfTheOneThatJoins) {
  for (const Setting setting : {Setting::kJoin, Setting::kMasked}) {
    for (const Point point : points_of(setting)) try_out({.point = point});
  }
  try_out({.point = Point::kBack});
}

TEST(JoinCrash, OfOneThatLetsItIn) {
  for (const Point point : points_of(Setting::kLetIn)) {
    try_out({.member = kWitness, .point = point});
  }
}

// The thread behind a door ends with its process only.
TEST(JoinCrash, BehindADoor) {
  if (!ranks_are_processes()) return;
  for (const Point point : points_of(Setting::kDoor)) {
    try_out({.point = point});
    try_out({.member = kHost, .point = point});
  }
}

}  // namespace
}  // namespace tandem::test
