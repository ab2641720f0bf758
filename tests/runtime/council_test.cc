// Decisions of ranks that share nothing but letters: one at a time, the same for all, whatever is
// lost, late or comes out of order; and by one side at most if they are parted.
#include "runtime/council.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>

namespace tandem::runtime {
namespace {

constexpr std::uint32_t kFirst = 1;

// Ranks and the letters that are under way between them.
class Post {
 public:
  explicit Post(int num_ranks) : dead_(num_ranks), side_(num_ranks), logs_(num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      councils_.push_back(std::make_unique<Council>(
          rank, std::vector<bool>(num_ranks, true), kFirst,
          [this, rank](std::uint32_t number, const Change& change) {
            EXPECT_EQ(number, kFirst + 1 + logs_[rank].size()) << "in turn";
            logs_[rank].push_back(encode(change));
          }));
    }
  }

  [[nodiscard]] Council& of(int rank) { return *councils_[rank]; }
  [[nodiscard]] std::size_t num_letters() const { return letters_.size(); }
  void kill(int rank) { dead_[rank] = true; }
  // Letters between ranks of different sides are lost.
  void part(std::vector<int> side) { side_ = std::move(side); }

  void propose(int rank, const Change& change) {
    if (!dead_[rank]) send(rank, of(rank).propose(of(rank).number(), change));
  }
  void send(int from, Council::Letters letters) {
    for (Council::Letter& letter : letters) letters_.push_back({from, std::move(letter)});
  }
  // Letter `index` comes, or is lost.
  void deliver(std::size_t index, bool is_lost = false) {
    const auto [from, letter] = std::move(letters_[index]);
    letters_.erase(letters_.begin() + static_cast<std::ptrdiff_t>(index));
    if (is_lost || dead_[letter.to] || side_[from] != side_[letter.to]) return;
    send(letter.to, of(letter.to).take(from, letter.text));
  }
  void deliver_all() {
    while (!letters_.empty()) deliver(0);
  }

  // What all have decided, each as far as it knows, is the same.
  void expect_agreement() const {
    for (const auto& log : logs_) {
      for (const auto& other : logs_) {
        const std::size_t both = std::min(log.size(), other.size());
        EXPECT_TRUE(std::equal(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(both),
                               other.begin()));
      }
    }
  }
  [[nodiscard]] std::size_t num_decided(int rank) const { return logs_[rank].size(); }

 private:
  std::vector<std::unique_ptr<Council>> councils_;
  std::vector<bool> dead_;
  std::vector<int> side_;
  std::vector<std::vector<std::vector<std::byte>>> logs_;
  std::vector<std::pair<int, Council::Letter>> letters_;
};

Change masks(int proposer, std::vector<int> ranks) {
  return {.kind = Change::Kind::kMask,
          .proposer = proposer,
          .ranks = std::move(ranks),
          .cause = Failure{.info = {.code = ErrorCode::kTimeout, .peer = proposer},
                           .message = "rank " + std::to_string(proposer)}};
}

TEST(Council, WhatOneProposesAllDecide) {
  Post post(5);
  post.propose(3, masks(3, {1}));
  post.deliver_all();
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(post.of(rank).number(), kFirst + 1);
    EXPECT_EQ(post.of(rank).members(), (std::vector<bool>{true, false, true, true, true}));
  }
  post.propose(1, masks(1, {0}));  // is no member
  EXPECT_EQ(post.num_letters(), 0U);
  post.propose(0, {.kind = Change::Kind::kUnmask, .ranks = {1}, .from = 9});
  post.deliver_all();
  post.propose(4, {.kind = Change::Kind::kStart, .from = 20});
  post.deliver_all();
  EXPECT_EQ(post.of(1).members(), std::vector<bool>(5, true));
  EXPECT_EQ(post.of(1).num_starts(), 1U);
  post.expect_agreement();
}

// More than half decide, or half with the lowest member; the others do not.
TEST(Council, OneSideAtMostDecides) {
  for (const int num_ranks : {2, 3, 4, 5}) {
    for (unsigned bits = 0; bits < 1U << num_ranks; ++bits) {
      Post post(num_ranks);
      std::vector<int> side(num_ranks);
      int num_ones = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        side[rank] = static_cast<int>(bits >> rank & 1U);
        num_ones += side[rank];
      }
      post.part(side);
      for (int turn = 0; turn < 3; ++turn) {
        for (int rank = 0; rank < num_ranks; ++rank) {
          std::vector<int> others;
          for (int other = 0; other < num_ranks; ++other) {
            if (side[other] != side[rank]) others.push_back(other);
          }
          if (post.num_decided(rank) == 0) post.propose(rank, masks(rank, others));
          post.deliver_all();
        }
      }
      const int half = 2 * num_ones - num_ranks;  // > 0: the ones are more
      const int winner = half > 0 || (half == 0 && side[0] == 1) ? 1 : 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        EXPECT_EQ(post.num_decided(rank) > 0, side[rank] == winner) << num_ranks << ' ' << bits;
      }
    }
  }
}

// The proposer has died after its proposal was accepted: it may have been decided, and stands.
TEST(Council, WhatMayHaveBeenDecidedIsKept) {
  Post post(3);
  post.propose(0, masks(0, {2}));
  while (post.num_decided(0) == 0) post.deliver(0);
  post.kill(0);
  while (post.num_letters() > 0) post.deliver(0, true);  // nobody hears of it
  EXPECT_EQ(post.num_decided(1), 0U);
  post.propose(2, masks(2, {0, 1}));
  post.deliver_all();
  EXPECT_EQ(post.of(1).members(), (std::vector<bool>{true, true, false}));
  post.expect_agreement();
}

TEST(Council, WhoHasMissedDecisionsHearsOfThemWithTheNextOne) {
  Post post(5);
  post.part({0, 0, 0, 0, 1});
  post.propose(0, masks(0, {3}));
  post.deliver_all();
  post.propose(1, {.kind = Change::Kind::kStart, .from = 8});
  post.deliver_all();
  EXPECT_EQ(post.num_decided(4), 0U);
  post.part({0, 0, 0, 0, 0});
  // Who is behind proposes, and is told.
  post.propose(4, masks(4, {0, 1}));
  post.deliver_all();
  EXPECT_EQ(post.num_decided(4), 2U);
  post.propose(2, masks(2, {0}));
  post.deliver_all();
  EXPECT_EQ(post.num_decided(4), 3U);
  post.expect_agreement();
}

// What the process before it has promised in its name nobody has told it.
TEST(Council, WhoComesLaterOnlyListensUntilItTakesPart) {
  Post post(3);
  post.of(2).begin_late(4);
  EXPECT_EQ(post.of(2).num_starts(), 4U);
  post.kill(1);
  post.propose(2, masks(2, {1}));
  EXPECT_EQ(post.num_letters(), 0U);
  post.propose(0, masks(0, {1}));
  post.deliver_all();
  EXPECT_EQ(post.num_decided(0), 0U) << "its word does not count";
  post.of(2).take_part();
  post.propose(0, masks(0, {1}));
  post.deliver_all();
  EXPECT_EQ(post.num_decided(0), 1U);
  EXPECT_EQ(post.num_decided(2), 1U);

  post.of(2).begin_late(0);
  post.propose(0, {.kind = Change::Kind::kMask, .proposer = 0, .ranks = {2}});
  post.deliver_all();
  EXPECT_EQ(post.num_decided(2), 2U) << "it hears what is decided";
}

TEST(Council, LettersThatMakeNoSenseAreDropped) {
  Post post(3);
  std::minstd_rand random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> text(random() % 80);
    for (std::byte& byte : text) byte = static_cast<std::byte>(random() % 4);
    post.send(0, {{.to = 1, .text = text}});
    post.deliver(post.num_letters() - 1);
    while (post.num_letters() > 0) post.deliver(0, true);
  }
  Change change = masks(0, {1, 2});
  change.kind = Change::Kind::kSettle;
  change.words = {1, ~layout::Word{0}, 3};
  const std::vector<std::byte> good = encode(change);
  EXPECT_EQ(decode_change(good, 3)->words, change.words);
  for (std::size_t size = 0; size < good.size(); ++size) {
    if (const auto decoded = decode_change(std::span(good).first(size), 3)) {
      EXPECT_FALSE(decoded->cause && decoded->cause->message == change.cause->message);
    }
  }
  EXPECT_FALSE(decode_change(encode(masks(0, {3})), 3));
  EXPECT_FALSE(decode_change(encode(masks(3, {0})), 3));
}

// However many ranks are lost and settled and let in again.
TEST(Council, LettersHoldTheLastSettlementOnly) {
  Post post(3);
  std::size_t longest = 0;
  for (int turn = 0; turn < 4; ++turn) {
    post.propose(0, {.kind = Change::Kind::kLose, .ranks = {1}, .from = 8});
    post.deliver_all();
    EXPECT_FALSE(post.of(2).members()[1]);
    post.propose(
        2, {.kind = Change::Kind::kSettle, .ranks = {1}, .words = std::vector<layout::Word>(1000)});
    post.deliver_all();
    const std::size_t length = post.of(2).news().size();
    if (turn == 0) longest = length + 1000;
    EXPECT_LT(length, longest);
    post.propose(0, {.kind = Change::Kind::kUnmask, .ranks = {1}, .from = 8});
    post.deliver_all();
    EXPECT_TRUE(post.of(0).members()[1]);
  }
  post.expect_agreement();
}

// Any order, any losses, proposals at any time, deaths and cuts: never two decisions of one number.
// Whoever is left and can be reached decides in the end.
TEST(Council, RandomSchedulesNeverDisagree) {
  // One thread and much arithmetic, of which sanitizers make minutes and learn nothing more.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr unsigned kNumSchedules = 300;
#else
  constexpr unsigned kNumSchedules = 3'000;
#endif
  std::map<std::size_t, int> decisions;
  for (unsigned seed = 0; seed < kNumSchedules; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto draw = [&](int below) { return static_cast<int>(random() % below); };
    const int num_ranks = 2 + draw(5);
    Post post(num_ranks);
    for (int step = 0; step < 300; ++step) {
      const int what = draw(100);
      const int rank = draw(num_ranks);
      if (what < 12) {
        Change change = masks(rank, {draw(num_ranks)});
        if (draw(3) == 0) change = {.kind = Change::Kind::kUnmask, .ranks = {draw(num_ranks)}};
        if (draw(8) == 0)
          change = {.kind = Change::Kind::kStart, .from = static_cast<layout::Epoch>(random())};
        change.proposer = rank;
        post.propose(rank, change);
      } else if (what == 12 && draw(4) == 0) {
        post.kill(rank);
      } else if (what == 13 && draw(3) == 0) {
        std::vector<int> side(num_ranks);
        for (int& each : side) each = draw(2);
        post.part(side);
      } else if (what == 14) {
        post.part(std::vector<int>(num_ranks));
      } else if (post.num_letters() > 0) {
        post.deliver(static_cast<std::size_t>(draw(static_cast<int>(post.num_letters()))),
                     draw(10) == 0);
      }
      post.expect_agreement();
    }
    ++decisions[post.num_decided(0)];
  }
  EXPECT_GT(decisions.rbegin()->first, 5U) << "schedules decide something";
}

}  // namespace
}  // namespace tandem::runtime
