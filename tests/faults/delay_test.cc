// A rank that stops at any point of the protocol for longer than others wait, and then goes on:
// they miss it, it learns that it was missed before it does harm, and it comes back.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "faults/script.h"
#include "faults/settings.h"
#include "support/party.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kVictim = 1;
constexpr int kPairsAfterwards = 3;

// Gates
constexpr int kStalled = 0;  // the victim has stopped
constexpr int kGo = 1;       // it may go on
constexpr int kStarved = 2;  // somebody else was missed: the machine was too slow for this timeout

struct Case {
  Placement placement;
  OnTimeout on_timeout;
};

void PrintTo(const Case& which, std::ostream* out) {
  *out << name(which.placement) << ", " << name(which.on_timeout);
}

// Between the flag and its end peers cannot tell a rank that writes from one that has stopped.
bool is_writing(Point point) { return point >= Point::kFlagRaised && point <= Point::kRowsWritten; }

struct Trial {
  Point point;
  OnTimeout on_timeout;
  const Common& common;
  bool has_leaver = false;

  [[nodiscard]] bool is_innocent(int rank, int num_ranks) const {
    return rank != kVictim && (!has_leaver || rank != num_ranks - 1);
  }

  // The trial is void: nobody waits for anybody any more.
  void give_up() const {
    for (const int gate : {kStarved, kStalled, kGo}) common.open(gate);
  }

  // Were only those lost who had to be?
  [[nodiscard]] bool fair(const Present& present) const {
    for (int rank = 0; rank < static_cast<int>(present.size()); ++rank) {
      if (is_innocent(rank, static_cast<int>(present.size())) && !present[rank]) {
        give_up();
        return false;
      }
    }
    return true;
  }

  // Where a wait that ends is an error: was it one for somebody who had to be missed?
  [[nodiscard]] bool fair(const Error& error, int num_ranks) const {
    if (error.code() != ErrorCode::kTimeout || !is_innocent(error.peer(), num_ranks)) return true;
    give_up();
    return false;
  }
};

// Together with the others, once the victim writes no more: it goes on, in its own time.
Present recover_after_it(Buffer& buffer) {
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      return buffer.recover();
    } catch (const Error& error) {
      const bool still_writes = error.info().phase == Phase::kMembership && error.peer() == kVictim;
      if (!still_writes || std::chrono::steady_clock::now() - start > 30s) throw;
    }
  }
}

// Until the victim is missed, and on until it is back.
void survive(Rank& rank, Party& party, Buffer& buffer, const Trial& trial) {
  int pairs_without = 0;
  int errors = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int pairs_with = 0; pairs_with < kPairsAfterwards;) {
    if (!rank.expect(std::chrono::steady_clock::now() - start < 30s, "the victim is not back")) {
      return;
    }
    if (trial.common.is_open(kStarved)) return;
    const bool was_missed = pairs_without + errors > 0;
    if (rank.index() == 0 && was_missed && !buffer.active()[kVictim]) {
      try {
        if (trial.common.is_open(kGo)) buffer.unmask(kVictim);
      } catch (const Error& error) {
        rank.expect(error.code() == ErrorCode::kOrder, error.what());  // it is not there yet
      }
    }
    try {
      const Present seen = party.run(buffer);
      if (!trial.fair(seen)) return;
      pairs_without += seen[kVictim] ? 0 : 1;
      pairs_with += seen[kVictim] && was_missed ? 1 : 0;
    } catch (const Error& error) {
      if (!trial.fair(error, rank.size())) return;
      ++errors;
      const bool expected = (error.code() == ErrorCode::kTimeout && error.peer() == kVictim) ||
                            (trial.has_leaver && error.code() == ErrorCode::kPeerLost);
      rank.expect(expected, error.what());
      rank.expect(trial.on_timeout == OnTimeout::kFail || is_writing(trial.point) ||
                      trial.point >= Point::kMeeting,
                  std::string("an error without need: ") + error.what());
      trial.common.open(kGo);
      pairs_with = 0;
      if (!trial.fair(recover_after_it(buffer))) return;
    }
    if (pairs_without == 2) trial.common.open(kGo);
  }
}

void come_back(Rank& rank, Buffer& buffer, const Trial& trial) {
  const auto start = std::chrono::steady_clock::now();
  for (bool back = false; !back && !trial.common.is_open(kStarved);) {
    if (std::chrono::steady_clock::now() - start > 60s) throw std::runtime_error("is not let in");
    try {
      buffer.recover();
      back = true;
    } catch (const Error& error) {  // nobody has let it in yet
      rank.expect(error.code() == ErrorCode::kTimeout, error.what());
    }
  }
}

// Stops somewhere on its way, is told, comes back.
void be_late(Rank& rank, Party& party, Buffer& buffer, const Trial& trial) {
  for (int pairs = 0; pairs < kPairsAfterwards || !trial.common.is_open(kStalled);) {
    if (trial.common.is_open(kStarved)) return;
    try {
      const bool came_late = trial.common.is_open(kStalled);
      if (!trial.fair(party.run(buffer))) return;
      pairs += came_late ? 1 : 0;
    } catch (const Error& error) {
      if (!trial.fair(error, rank.size())) return;
      pairs = 0;
      const bool expected = error.code() == ErrorCode::kMasked ||
                            error.code() == ErrorCode::kTimeout ||
                            (trial.has_leaver && error.code() == ErrorCode::kPeerLost);
      rank.expect(expected, error.what());
      come_back(rank, buffer, trial);
    }
  }
}

class Delay : public testing::TestWithParam<Case> {
 protected:
  // "" or what went wrong; nothing if ranks that did nothing wrong were missed.
  static std::optional<std::string> try_out(Point point, int nth,
                                            std::chrono::nanoseconds timeout) {
    const bool has_leaver = setting_of(point) == Setting::kLoss;
    const int num_ranks = has_leaver ? 4 : 3;
    const Shape shape = entangled(num_ranks, GetParam().placement);
    static std::map<std::pair<int, Placement>, Oracles> known;
    const Oracles& oracles =
        known.try_emplace({num_ranks, GetParam().placement}, shape).first->second;
    const Common common;
    const Trial trial{point, GetParam().on_timeout, common, has_leaver};
    const std::string failures = failures_of_ranks(num_ranks, [&](Rank& rank) {
      BufferOptions options = options_for(shape);
      options.on_timeout = trial.on_timeout;
      options.timeout = timeout;
      Buffer buffer(rank.communicator(), options);
      Party party(rank, oracles, buffer);
      try {
        if (!trial.fair(party.run(buffer))) return;
      } catch (const Error& error) {  // of nobody who is late on purpose
        if (error.code() == ErrorCode::kTimeout) trial.give_up();
        throw;
      }
      rank.barrier();
      if (has_leaver && rank.index() == num_ranks - 1) return;
      if (setting_of(point) == Setting::kMasked) {
        if (rank.index() == 0) buffer.mask(kVictim);
        rank.barrier();
      }
      if (setting_of(point) == Setting::kRecovery) {
        fail_together(rank, party, buffer);
        const std::optional<Error> failure = buffer.last_loss();
        if (failure && failure->code() == ErrorCode::kTimeout) trial.give_up();
      }
      if (rank.index() != kVictim) {
        if (setting_of(point) == Setting::kRecovery) buffer.recover();
        // Who stops while it waits has to wait for somebody.
        if (setting_of(point) == Setting::kWait || has_leaver) common.wait(kStalled);
        survive(rank, party, buffer, trial);
        return;
      }
      Script script;
      script.inject(party.handle());
      script.at(point, nth, [&] {
        common.open(kStalled);
        common.wait(kGo);
      });
      if (setting_of(point) == Setting::kRecovery) come_back(rank, buffer, trial);
      be_late(rank, party, buffer, trial);
      Script().inject(party.handle());
    });
    if (common.is_open(kStarved)) return {};
    return failures + (common.is_open(kStalled) ? "" : "the point was not passed");
  }

  static void expect_good(Point point, int nth) {
    SCOPED_TRACE("point " + std::to_string(static_cast<int>(point)) + ", passing " +
                 std::to_string(nth));
    // What the machine is too busy for is tried again with more time.
    for (const std::chrono::milliseconds timeout : {60ms, 300ms, 1500ms}) {
      const std::optional<std::string> failures = try_out(point, nth, timeout);
      if (!failures) continue;
      EXPECT_EQ(*failures, "");
      return;
    }
    ADD_FAILURE() << "ranks that did nothing wrong were missed";
  }
};

TEST_P(Delay, InAnOperation) {
  for (const Point point : points_of(Setting::kOperation)) expect_good(point, 1);
}

TEST_P(Delay, LaterInAnOperation) {
  for (const Point point : points_of(Setting::kOperation)) {
    const bool is_about_one_peer = point == Point::kCount || point == Point::kArgument ||
                                   point == Point::kHeader || point == Point::kArrived ||
                                   point == Point::kCompleted;
    if (is_about_one_peer || point == Point::kRow) expect_good(point, 3);
  }
}

TEST_P(Delay, WhileItWaits) {
  for (const Point point : points_of(Setting::kWait)) expect_good(point, 1);
}

TEST_P(Delay, WhileItTellsOfAnotherLoss) {
  for (const Point point : points_of(Setting::kLoss)) expect_good(point, 1);
}

TEST_P(Delay, WhileItRecovers) {
  for (const Point point : points_of(Setting::kRecovery)) expect_good(point, 1);
}

TEST_P(Delay, WhileItIsMasked) {
  for (const Point point : points_of(Setting::kMasked)) expect_good(point, 1);
}

// Rank 0 waits for rank 2, which waits for the header of rank 1 that rank 0 has; it has been
// waiting for that of rank 0 before.
TEST(Blame, IsOnTheOneWhoIsWaitedForAtTheEnd) {
  constexpr int kWaits = 3;  // gates
  constexpr int kHeld = 4;
  const Shape shape = entangled(3, Placement::kPacked);
  const Oracles oracles(shape);
  const Common common;
  run_ranks(3, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Party party(rank, oracles, buffer);
    party.run(buffer);
    Script script;
    script.inject(party.handle());
    rank.barrier();
    if (rank.index() == 0) {
      common.wait(kWaits);
      // Rank 1 has sent it everything: it waits for rank 2 alone, and not long.
      script.at(Point::kFlagLowered, 1, [&] {
        common.wait(kHeld);
        Script::set_timeout(party.handle(), 500ms);
      });
    } else if (rank.index() == 1) {
      script.drop(Point::kHeader, 2);
      script.at(
          Point::kArrived, 1,
          [&] {
            common.open(kHeld);
            common.wait(kGo);
          },
          2);
    } else {
      script.at(
          Point::kWaiting, 1, [&] { common.open(kWaits); }, 0);
    }
    const ErrorInfo info = rank.expect_error(ErrorCode::kTimeout, {"rank 0 waited for rank 2"},
                                             [&] { party.run(buffer); });
    rank.expect_equal(info.peer, 1, "culprit");
    common.open(kGo);
    rank.barrier();
    Script().inject(party.handle());
  });
}

INSTANTIATE_TEST_SUITE_P(AtEveryPoint, Delay,
                         testing::Values(Case{Placement::kPacked, OnTimeout::kFail},
                                         Case{Placement::kSlotted, OnTimeout::kFail},
                                         Case{Placement::kPacked, OnTimeout::kMask},
                                         Case{Placement::kSlotted, OnTimeout::kMask}),
                         [](const testing::TestParamInfo<Case>& which) {
                           return std::string(name(which.param.placement)) + "_" +
                                  std::string(name(which.param.on_timeout));
                         });

}  // namespace
}  // namespace tandem::test
