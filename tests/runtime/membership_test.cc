// Views of who takes part: proposed by several, decided once, read while they change.
#include "runtime/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <thread>

#include "support/guarded_block.h"
#include "tandem/communicator.h"

namespace tandem::runtime {
namespace {

constexpr Epoch kFirst = 7;

TEST(Membership, StartsWithThoseWhoAreThere) {
  run_threads(2, [](const Communicator& communicator) {
    const Membership membership(*communicator.bootstrap(), 3, kFirst);
    EXPECT_EQ(membership.view().active, (std::vector<bool>{true, true, false}));
    EXPECT_EQ(membership.view().from, (std::vector<Epoch>{kFirst, kFirst, kFirst}));
    EXPECT_EQ(membership.view().round, 0U);
    communicator.barrier();
    EXPECT_FALSE(membership.changed());
    const View newest = membership.newest();
    EXPECT_EQ(newest.active, membership.view().active);
    EXPECT_EQ(newest.from, membership.view().from);
    EXPECT_FALSE(newest.cause);
    communicator.barrier();
  });
}

// Of proposals made at once one wins, and everybody reads that one.
TEST(Membership, DecidesOnceForAll) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 500;
  std::vector<int> winners(kRounds);
  std::barrier barrier(kRanks);
  run_threads(kRanks, [&](const Communicator& communicator) {
    const int rank = communicator.rank();
    Membership membership(*communicator.bootstrap(), kRanks, kFirst);
    for (int round = 0; round < kRounds; ++round) {
      barrier.arrive_and_wait();
      View next = membership.view();
      std::fill(next.from.begin(), next.from.end(), static_cast<Epoch>(100 * round + rank));
      next.cause = Failure{.info = {.peer = rank}, .message = "round " + std::to_string(round)};
      if (membership.propose(std::move(next))) winners[round] = rank;
      barrier.arrive_and_wait();
      ASSERT_TRUE(membership.changed());
      membership.adopt(membership.newest());
      const View& view = membership.view();
      EXPECT_EQ(view.proposer, winners[round]);
      EXPECT_EQ(view.from.front(), static_cast<Epoch>(100 * round + winners[round]));
      EXPECT_EQ(view.from.back(), view.from.front());
      ASSERT_TRUE(view.cause);
      EXPECT_EQ(view.cause->info.peer, winners[round]);
      EXPECT_EQ(view.cause->message, "round " + std::to_string(round));
    }
    EXPECT_EQ(membership.view().generation, 1U + kRounds);
    EXPECT_EQ(membership.ask((rank + 1) % kRanks, Status::kAcked) > kRounds - 1, true);
    barrier.arrive_and_wait();
  });
}

TEST(Membership, ReadsWhatIsDecidedWhileItChanges) {
  std::barrier barrier(2);
  std::atomic<bool> done{false};
  run_threads(2, [&](const Communicator& communicator) {
    Membership membership(*communicator.bootstrap(), 2, kFirst);
    barrier.arrive_and_wait();
    if (communicator.rank() == 0) {
      for (Epoch i = 1; i < 20'000; ++i) {
        View next = membership.view();
        next.from = {i, i};
        ASSERT_TRUE(membership.propose(std::move(next)));
        membership.adopt(membership.newest());
      }
      done = true;
    } else {
      std::uint32_t last = 0;
      while (!done) {
        const View view = membership.newest();
        EXPECT_EQ(view.from[0], view.from[1]);
        EXPECT_GE(view.generation, last);
        last = view.generation;
      }
    }
    barrier.arrive_and_wait();
  });
}

TEST(Membership, RemembersTheLastViews) {
  run_threads(2, [](const Communicator& communicator) {
    Membership membership(*communicator.bootstrap(), 2, kFirst);
    for (int i = 0; i < 12; ++i) {  // in turn
      communicator.barrier();
      if (membership.changed()) membership.adopt(membership.newest());
      if (i % 2 == communicator.rank()) {
        View next = membership.view();
        next.from = {static_cast<Epoch>(i), 0};
        ASSERT_TRUE(membership.propose(std::move(next)));
      }
      communicator.barrier();
    }
    const std::uint32_t newest = membership.newest().generation;
    EXPECT_EQ(newest, 13U);
    for (std::uint32_t back = 0; back < 5; ++back) {
      const std::optional<View> view = membership.find(newest - back);
      ASSERT_TRUE(view) << back;
      EXPECT_EQ(view->generation, newest - back);
      EXPECT_EQ(view->from[0], 11 - back);
    }
    EXPECT_FALSE(membership.find(1));
    communicator.barrier();
  });
}

// Either the writer sees the new view, or whoever decided sees that it writes.
TEST(Membership, WriterAndDeciderCannotMissEachOther) {
  constexpr int kRounds = 2000;
  std::barrier barrier(2);
  bool wrote = false;
  bool seen = false;
  run_threads(2, [&](const Communicator& communicator) {
    Membership membership(*communicator.bootstrap(), 2, kFirst);
    for (int round = 0; round < kRounds; ++round) {
      barrier.arrive_and_wait();
      if (communicator.rank() == 0) {
        ASSERT_TRUE(membership.propose(membership.view()));
        seen = membership.may_be_writing(1);
      } else {
        wrote = membership.begin_writing();
      }
      barrier.arrive_and_wait();
      EXPECT_TRUE(!wrote || seen || membership.ask(1, Status::kWriting) != 0);
      if (communicator.rank() == 0 && wrote && !seen) {
        // It began after the look, and before the decision was visible to it.
        ADD_FAILURE() << "round " << round;
      }
      barrier.arrive_and_wait();
      if (communicator.rank() == 1) membership.end_writing();
      membership.adopt(membership.newest());
    }
    barrier.arrive_and_wait();
  });
}

// Whoever has won and not looked yet must not write over what peers read.
TEST(Membership, APreviousProposalThatHasWonStays) {
  run_threads(1, [](const Communicator& communicator) {
    Membership membership(*communicator.bootstrap(), 2, kFirst);
    View next = membership.view();
    next.active[1] = true;
    EXPECT_TRUE(membership.propose(next));
    next.active[1] = false;
    EXPECT_FALSE(membership.propose(next));
    EXPECT_TRUE(membership.newest().active[1]);
  });
}

// Not looked for again and again.
TEST(Membership, ADecisionThatNoRankCanHaveMadeIsRefused) {
  for (const Word decision :
       {layout::make_word(1, 2), layout::make_word(2, 2), layout::make_word(2, ~0U),
        layout::make_word(0, 0), layout::make_word(~0U, 0), ~Word{0}}) {
    const test::PeersOnBoard board(0, 2, kFirst);
    test::PlacedBootstrap bootstrap(0, 2, board.board);
    const Membership membership(bootstrap, 2, kFirst);
    std::atomic_ref<Word>(*reinterpret_cast<Word*>(board.board.at(0))) = decision;
    EXPECT_TRUE(membership.changed());
    try {
      static_cast<void>(membership.newest());
      ADD_FAILURE() << "decision " << decision;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    }
  }
}

TEST(Membership, KnowsWhoHasLeft) {
  std::barrier barrier(2);
  run_threads(2, [&](const Communicator& communicator) {
    auto membership = std::make_unique<Membership>(*communicator.bootstrap(), 2, kFirst);
    EXPECT_FALSE(membership->is_gone(0));
    EXPECT_FALSE(membership->is_gone(1));
    barrier.arrive_and_wait();
    if (communicator.rank() == 1) membership.reset();
    barrier.arrive_and_wait();
    if (communicator.rank() == 0) {
      EXPECT_TRUE(membership->is_gone(1));
    }
    barrier.arrive_and_wait();
  });
}

TEST(Membership, OfManyRanksTakesLittleAndHasRoomForAll) {
  constexpr layout::Board board(kMaxRanks);
  static_assert(board.size_bytes() < std::int64_t{64} << 20);  // of which what is touched counts
  static_assert(board.view(0, 7) + board.view_words() * 8 <= board.status(1, Status::kAcked));
  static_assert(board.status(0, Status::kAcked) % layout::kControlAlignment == 0);
  static_assert(board.view(kMaxRanks - 1, 7) + board.view_words() * 8 <= board.size_bytes());
}

}  // namespace
}  // namespace tandem::runtime
