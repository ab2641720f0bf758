// A rank that ends at any point of the protocol: the others learn who it was, in bounded time, none
// of them sees a wrong row, and they go on without it.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "faults/script.h"
#include "faults/settings.h"
#include "support/party.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kVictim = 1;
constexpr int kDied = 0;  // gate: the victim has come to its end

struct Case {
  int num_ranks;
  Placement placement;
  OnTimeout on_timeout;
};

void PrintTo(const Case& which, std::ostream* out) {
  *out << which.num_ranks << " ranks, " << name(which.placement) << ", " << name(which.on_timeout);
}

BufferOptions options_of(const Case& which, const Shape& shape) {
  BufferOptions options = options_for(shape);
  options.on_timeout = which.on_timeout;
  options.timeout = 60s;              // nobody is late
  options.first_epoch = 0xfffffffcU;  // the wrap falls into the middle
  return options;
}

// Those who are left, from the operation in which somebody ends to the second one after: none gets
// a wrong row, all go on with the same ranks.
void survive(Rank& rank, Party& party, Buffer& buffer, const std::vector<int>& lost) {
  const Present rest = all_but(rank.size(), lost);
  const auto start = std::chrono::steady_clock::now();
  if (buffer.options().on_timeout == OnTimeout::kMask) {
    Present seen = party.run(buffer);
    for (int pair = 0; pair < 2; ++pair) seen = party.run(buffer);
    rank.expect(seen == rest, "goes on with those who are left");
  } else {
    int errors = 0;
    for (int pairs = 0, good = 0; good < 2; ++pairs) {
      if (!rank.expect(pairs < 8, "misses nobody")) return;
      try {
        good = party.run(buffer) == rest ? good + 1 : 0;
      } catch (const Error& error) {
        const bool named =
            std::any_of(lost.begin(), lost.end(), [&](int one) { return error.peer() == one; });
        rank.expect(named && error.code() == ErrorCode::kPeerLost, error.what());
        if (!rank.expect(++errors < 5, "the same error again and again")) return;
        good = 0;
        static_cast<void>(buffer.recover());
      }
    }
  }
  rank.expect(buffer.active() == rest, "knows who is left");
  rank.expect(std::chrono::steady_clock::now() - start < buffer.options().timeout,
              "waited for a timeout");
}

// The next counts, arguments and header to `peer` do not get there.
void lose_announcement(Script& script, const Shape& shape, int peer) {
  for (int expert = 0; expert < shape.num_experts; ++expert) script.drop(Point::kCount, peer);
  for (int which = 0; which < layout::kNumArguments; ++which) script.drop(Point::kArgument, peer);
  script.drop(Point::kHeader, peer);
}

class Crash : public testing::TestWithParam<Case> {
 protected:
  // The victim does `its_part` until it dies at the nth passing of a point; the others survive.
  // `prelude` comes before, on all ranks.
  struct Plan {
    int num_ranks;
    Point point;
    int nth = 1;
    bool others_wait = false;  // for the end of the victim
    std::vector<int> leavers = {};
    std::function<void(Rank&, Party&, Buffer&)> prelude = {};
    std::function<void(Rank&, Buffer&)> sequel = {};  // of the others, before they go on
  };

  void try_out(const Plan& plan) {
    const Shape shape = entangled(plan.num_ranks, GetParam().placement);
    const Oracles& oracles = oracles_for(shape);
    const Common common;
    std::vector<int> lost = plan.leavers;
    lost.push_back(kVictim);
    const std::string failures =
        failures_of_ranks(plan.num_ranks,
                          [&](Rank& rank) {
                            Buffer buffer(rank.communicator(), options_of(GetParam(), shape));
                            Party party(rank, oracles, buffer);
                            party.run(buffer);
                            Script script;
                            script.inject(party.handle());
                            rank.barrier();
                            if (std::find(plan.leavers.begin(), plan.leavers.end(), rank.index()) !=
                                plan.leavers.end()) {
                              return;
                            }
                            if (plan.prelude) plan.prelude(rank, party, buffer);
                            if (rank.index() == kVictim) {
                              script.at(plan.point, plan.nth, [&] {
                                common.hit(plan.point);
                                common.open(kDied);
                                rank.die();
                              });
                              if (plan.prelude) buffer.recover();
                              for (int pair = 0; pair < 3; ++pair) {
                                try {
                                  party.run(buffer);
                                } catch (const Error& error) {
                                  rank.expect(error.code() == ErrorCode::kPeerLost, error.what());
                                  buffer.recover();
                                }
                              }
                              rank.fail("the victim has not come to the point");
                              return;
                            }
                            if (plan.others_wait) common.wait(kDied);
                            if (plan.sequel) plan.sequel(rank, buffer);
                            survive(rank, party, buffer, lost);
                          },
                          {.may_die = {kVictim}});
    EXPECT_EQ(failures, "") << "point " << static_cast<int>(plan.point) << ", passing " << plan.nth;
    EXPECT_EQ(common.hits(plan.point), 1) << "point " << static_cast<int>(plan.point);
  }

  // `body` on every rank, after a first pair of operations.
  void run_to_the_end(
      const Shape& shape, const std::vector<int>& may_die,
      const std::function<void(Rank&, Party&, Buffer&, Script&, const Common&)>& body) {
    const Oracles& oracles = oracles_for(shape);
    const Common common;
    run_ranks(shape.num_ranks,
              [&](Rank& rank) {
                Buffer buffer(rank.communicator(), options_of(GetParam(), shape));
                Party party(rank, oracles, buffer);
                party.run(buffer);
                Script script(&common);
                script.inject(party.handle());
                rank.barrier();
                body(rank, party, buffer, script, common);
              },
              {.may_die = may_die});
    hits_.resize(kNumPoints);
    for (int point = 0; point < kNumPoints; ++point) hits_[point] = common.hits(Point(point));
  }

  // How often the victim passes each point in a pair of operations.
  std::vector<int> passings() {
    const Shape shape = entangled(GetParam().num_ranks, GetParam().placement);
    const Oracles& oracles = oracles_for(shape);
    const Common common;
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_of(GetParam(), shape));
      Party party(rank, oracles, buffer);
      party.run(buffer);
      Script script(&common);
      if (rank.index() == kVictim) script.inject(party.handle());
      party.run(buffer);
      if (rank.index() == kVictim) Script().inject(party.handle());
    });
    std::vector<int> counts(kNumPoints);
    for (int point = 0; point < kNumPoints; ++point) counts[point] = common.hits(Point(point));
    return counts;
  }

  // Of all ranks, in the last run_to_the_end.
  [[nodiscard]] int hits(Point point) const { return hits_[static_cast<int>(point)]; }

 private:
  static const Oracles& oracles_for(const Shape& shape) {
    static std::map<std::pair<int, Placement>, Oracles> known;
    return known.try_emplace({shape.num_ranks, shape.placement}, shape).first->second;
  }

  std::vector<int> hits_;
};

// The first passing, the second, one in the middle, the last.
TEST_P(Crash, InAnOperation) {
  const std::vector<int> counts = passings();
  for (const Point point : points_of(Setting::kOperation)) {
    const int count = counts[static_cast<int>(point)];
    ASSERT_GT(count, 0) << "point " << static_cast<int>(point) << " is not passed";
    for (const int nth : std::set<int>{1, std::min(2, count), (count + 1) / 2, count}) {
      try_out({.num_ranks = GetParam().num_ranks, .point = point, .nth = nth});
    }
  }
}

TEST_P(Crash, WhileItWaits) {
  for (const Point point : points_of(Setting::kWait)) {
    try_out({.num_ranks = GetParam().num_ranks, .point = point, .others_wait = true});
  }
}

// The victim is the one who misses another, and ends while it tells.
TEST_P(Crash, WhileItTellsOfAnotherLoss) {
  for (const Point point : points_of(Setting::kLoss)) {
    for (const bool others_wait : {true, false}) {
      // Where others do not wait, one of them may be the first to tell.
      if (!others_wait && point != Point::kAdopting && point != Point::kAdopted) continue;
      const int num_ranks = GetParam().num_ranks + 1;
      try_out({.num_ranks = num_ranks,
               .point = point,
               .others_wait = others_wait,
               .leavers = {num_ranks - 1}});
    }
  }
}

TEST_P(Crash, WhileItRecovers) {
  for (const Point point : points_of(Setting::kRecovery)) {
    for (const bool others_wait : {true, false}) {
      // To be back takes the others.
      if (others_wait && point == Point::kBack) continue;
      try_out({.num_ranks = GetParam().num_ranks,
               .point = point,
               .others_wait = others_wait,
               .prelude = fail_together,
               .sequel = [](Rank&, Buffer& buffer) { buffer.recover(); }});
    }
  }
}

TEST_P(Crash, WhileItIsMasked) {
  for (const Point point : points_of(Setting::kMasked)) {
    try_out({.num_ranks = GetParam().num_ranks,
             .point = point,
             .others_wait = true,
             .prelude =
                 [](Rank& rank, Party& party, Buffer& buffer) {
                   if (rank.index() == 0) buffer.mask(kVictim);
                   rank.barrier();
                   if (rank.index() != kVictim) return;
                   rank.expect_error(ErrorCode::kMasked, {"has been masked"},
                                     [&] { party.run(buffer); });
                 },
             .sequel =
                 [](Rank& rank, Buffer& buffer) {
                   rank.expect_error(ErrorCode::kOrder, {"does not wait to be let in"}, [&] {
                     while (!buffer.active()[kVictim]) buffer.unmask(kVictim);
                     // This one has not looked at the board yet.
                     throw Error(ErrorCode::kOrder, "does not wait to be let in");
                   });
                 }});
  }
}

// A rank ends after its rows and before all headers have been told, one who finished goes on, and
// the others must place rows as that one did: by counts that they have to take from it.
TEST_P(Crash, WhileOthersTakeOverItsCounts) {
  if (GetParam().on_timeout == OnTimeout::kFail || GetParam().placement == Placement::kPacked) {
    return;  // all stop alike; nobody has finished whose headers others lack
  }
  constexpr int kFirst = 0;   // has everything, finishes
  constexpr int kSecond = 1;  // takes over from the first
  constexpr int kHasFinished = 1;
  const int num_ranks = GetParam().num_ranks + 1;
  const int loser = num_ranks - 1;
  const Shape shape = entangled(num_ranks, GetParam().placement);
  for (const bool second_dies : {false, true}) {
    std::vector<int> lost{loser};
    if (second_dies) lost.push_back(kSecond);
    run_to_the_end(
        shape, lost,
        [&](Rank& rank, Party& party, Buffer& buffer, Script& script, const Common& common) {
          if (rank.index() == loser) {
            lose_announcement(script, shape, kSecond);
            script.at(Point::kCompleted, 1, [&] { rank.die(); });
          } else if (rank.index() == kFirst) {
            script.at(Point::kFinishedTold, 1, [&] { common.open(kHasFinished); });
          } else if (rank.index() == kSecond) {
            script.at(
                Point::kWaiting, 1, [&] { common.wait(kHasFinished); }, loser);
            script.at(Point::kTakingOver, 1, [&] {
              if (second_dies) rank.die();
            });
          }
          survive(rank, party, buffer, lost);
        });
    EXPECT_EQ(hits(Point::kTakingOver), 1);
  }
}

// As above, where the one who had the counts ends as well, after another took them over: the third
// takes them from that one.
TEST_P(Crash, AfterOthersTookOverItsCounts) {
  if (GetParam().on_timeout == OnTimeout::kFail || GetParam().placement == Placement::kPacked ||
      GetParam().num_ranks < 3) {
    return;
  }
  constexpr int kLoser = 3;
  const Shape shape = entangled(4, GetParam().placement);
  run_to_the_end(
      shape, {0, kLoser},
      [&](Rank& rank, Party& party, Buffer& buffer, Script& script, const Common& common) {
        if (rank.index() == kLoser) {
          for (const int peer : {1, 2}) lose_announcement(script, shape, peer);
          script.at(Point::kCompleted, 1, [&] { rank.die(); });
        } else if (rank.index() == 0) {
          script.at(Point::kCompleted, 1, [&] {
            common.open(0);
            rank.die();
          });
        } else {
          script.at(
              Point::kWaiting, 1, [&] { common.wait(0); }, kLoser);
          if (rank.index() == 1) {
            script.at(Point::kFinishedTold, 1, [&] { common.open(1); });
          } else {
            script.at(Point::kAdopted, 1, [&] { common.wait(1); });
          }
        }
        survive(rank, party, buffer, {0, kLoser});
      });
  EXPECT_EQ(hits(Point::kTakingOver), 2);
}

// As above, where what did not come is the word that the rows are there: they are given up, as
// zeros of token -1.
TEST_P(Crash, BeforeItsRowsAreAnnounced) {
  if (GetParam().on_timeout == OnTimeout::kFail || GetParam().placement == Placement::kPacked) {
    return;
  }
  constexpr int kLoser = 2;
  constexpr int kHasFinished = 1;
  run_to_the_end(
      entangled(3, GetParam().placement), {kLoser},
      [&](Rank& rank, Party& party, Buffer& buffer, Script& script, const Common& common) {
        if (rank.index() == kLoser) {
          script.drop(Point::kArrived, 1);
          script.at(Point::kCompleted, 1, [&] { rank.die(); });
        } else if (rank.index() == 0) {
          script.at(Point::kFinishedTold, 1, [&] { common.open(kHasFinished); });
        } else {
          script.at(
              Point::kWaiting, 1, [&] { common.wait(kHasFinished); }, kLoser);
        }
        party.run(buffer);
        rank.expect_equal(party.num_blank_rows() > 0, rank.index() == 1, "lacks rows");
        survive(rank, party, buffer, {kLoser});
      });
}

// One has added up the rows of a rank that another one misses at that moment: the sum that it
// returns is that of the ranks that its handle names.
TEST_P(Crash, BetweenAdditionAndTheLastLook) {
  if (GetParam().on_timeout == OnTimeout::kFail || GetParam().num_ranks < 3) return;
  constexpr int kIsMissed = 1;
  const Shape shape = entangled(3, GetParam().placement);
  run_to_the_end(
      shape, {kVictim},
      [&](Rank& rank, Party& party, Buffer& buffer, Script& script, const Common& common) {
        if (rank.index() == kVictim) {
          party.run(buffer, [&] {
            script.drop(Point::kHeader, 2);
            script.at(Point::kHeadersSent, 1, [&] { rank.die(); });
          });
        } else if (rank.index() == 0) {
          const Present seen = party.run(
              buffer, [&] { script.at(Point::kPulled, 1, [&] { common.wait(kIsMissed); }); });
          rank.expect(!seen[kVictim], "the victim is missed before the last look");
        } else {
          script.at(Point::kDecided, 1, [&] { common.open(kIsMissed); });
          party.run(buffer);
        }
        survive(rank, party, buffer, {kVictim});
      });
}

// A rank whose own word has been written over waits for itself. Whoever masked itself beside all it
// waits for might leave nobody who could let anybody in.
TEST_P(Crash, NobodyMasksItself) {
  if (GetParam().on_timeout == OnTimeout::kFail) return;
  constexpr int kGaveUp = 1;
  constexpr int kFinished = 2;  // gates: of rank r, kFinished + r
  const Shape shape = entangled(GetParam().num_ranks, GetParam().placement);
  const Oracles oracles(shape);
  const Common common;
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_of(GetParam(), shape));
    Party party(rank, oracles, buffer);
    party.run(buffer);
    Script script(&common);
    script.inject(party.handle());
    const auto expect_failure = [&] {
      const ErrorInfo error = rank.expect_error(
          ErrorCode::kTimeout, {"waited for rank 1 to finish"}, [&] { party.run(buffer); });
      rank.expect_equal(error.peer, kVictim, "culprit");
      common.open(kGaveUp);
    };
    if (rank.index() == kVictim) {
      script.drop(Point::kArrived, kVictim);
      // Its own rows are written: it waits until it misses nobody but itself, and then not long.
      script.at(Point::kFlagLowered, 1, [&] {
        script.at(Point::kWaiting, 1, [&] {
          for (int other = 0; other < rank.size(); ++other) {
            if (other != kVictim) common.wait(kFinished + other);
          }
          Script::set_timeout(party.handle(), 500ms);
        });
      });
      expect_failure();
      Script::set_timeout(party.handle(), buffer.options().timeout);
    } else {
      Exchange& exchange = party.exchange();
      exchange.dispatch(buffer);
      exchange.finish_dispatch();
      common.open(kFinished + rank.index());
      common.wait(kGaveUp);
      expect_failure();
    }
    rank.expect(buffer.recover() == Present(rank.size(), true), "all are there");
    party.run(buffer);
    Script().inject(party.handle());
  });
}

INSTANTIATE_TEST_SUITE_P(AtEveryPoint, Crash,
                         testing::Values(Case{2, Placement::kPacked, OnTimeout::kFail},
                                         Case{2, Placement::kSlotted, OnTimeout::kFail},
                                         Case{2, Placement::kPacked, OnTimeout::kMask},
                                         Case{2, Placement::kSlotted, OnTimeout::kMask},
                                         Case{3, Placement::kPacked, OnTimeout::kFail},
                                         Case{3, Placement::kSlotted, OnTimeout::kFail},
                                         Case{3, Placement::kPacked, OnTimeout::kMask},
                                         Case{3, Placement::kSlotted, OnTimeout::kMask}),
                         [](const testing::TestParamInfo<Case>& which) {
                           return std::to_string(which.param.num_ranks) + "_" +
                                  std::string(name(which.param.placement)) + "_" +
                                  std::string(name(which.param.on_timeout));
                         });

}  // namespace
}  // namespace tandem::test
