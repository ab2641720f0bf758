// What a lost rank had announced to some is, for all who go on, announced or not.
#include "backend/cuda/announcement.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::cuda {
namespace {

constexpr int kExperts = 3;
constexpr layout::Epoch kEpoch = 1;  // the one before last has wrapped

using Words = std::vector<layout::Word>;

std::uint32_t header_of(Operation operation) {
  return layout::encode(layout::Header{.operation = operation, .half = 1, .hash = 77});
}

// Counts, number of blocks, arguments, header, as of `epoch`.
Words announced(Operation operation, layout::Epoch epoch) {
  Words words;
  for (std::uint32_t value : {5U, 0U, 9U, 2U, 10U, 11U, 12U, header_of(operation)}) {
    words.push_back(layout::make_word(epoch, value));
  }
  return words;
}

Words nothing() { return announced(Operation::kDispatch, kEpoch - 2); }

std::vector<Announcement> spans(std::vector<Words>& holders) {
  return {holders.begin(), holders.end()};
}

TEST(Announcement, PiecesAreTheWordsOfOneSourceInABlock) {
  const layout::Block block({.num_ranks = 4, .num_experts = kExperts, .num_arrival_words = 258});
  std::int64_t total = 0;
  for (const AnnouncementPiece& piece : announcement_pieces(block, 1, 2)) {
    total += piece.num_words;
  }
  EXPECT_EQ(total, announcement_words(block));
  EXPECT_EQ(total, static_cast<std::int64_t>(nothing().size()));
  const auto pieces = announcement_pieces(block, 1, 2);
  EXPECT_EQ(pieces[0].offset, block.count(1, 2, 0));
  EXPECT_EQ(block.count(1, 2, kExperts - 1), pieces[0].offset + 8 * (kExperts - 1));
  EXPECT_EQ(pieces[2].offset, block.argument(1, 2, layout::Argument::kMaxTokens));
  EXPECT_EQ(block.argument(1, 2, layout::Argument::kAlignment), pieces[2].offset + 8 * 2);
}

TEST(Announcement, DispatchThatOneHasWholeIsGivenToAll) {
  std::vector<Words> holders{nothing(), announced(Operation::kDispatch, kEpoch), nothing()};
  holders[2][4] = layout::make_word(kEpoch, 10);  // a part of it has come
  const auto changed = agree_on_announcement(spans(holders), kEpoch + 1);
  EXPECT_EQ(changed, (std::vector<bool>{true, false, true}));
  for (const Words& words : holders) EXPECT_EQ(words, announced(Operation::kDispatch, kEpoch));
  EXPECT_EQ(newest_announced(spans(holders), kEpoch + 1), kEpoch);
}

TEST(Announcement, DispatchThatNobodyHasWholeIsTakenBack) {
  const Words whole = announced(Operation::kDispatch, kEpoch);
  for (std::size_t lacking = 0; lacking < whole.size(); ++lacking) {
    std::vector<Words> holders{nothing(), whole};
    holders[1][lacking] = nothing()[lacking];
    const auto changed = agree_on_announcement(spans(holders), kEpoch);
    EXPECT_TRUE(changed[1]);
    for (const Words& words : holders) {
      for (const layout::Word word : words) EXPECT_EQ(layout::epoch_of(word), kEpoch - 2);
    }
    EXPECT_EQ(newest_announced(spans(holders), kEpoch), kEpoch - 2);
  }
}

// Its counts are of a dispatch of the same parity, or of none at all.
TEST(Announcement, CombineStaysWithThoseWhoHaveIt) {
  const auto last = nothing().size() - 1;
  std::vector<Words> holders{announced(Operation::kCombine, kEpoch), nothing(), nothing()};
  for (int i = 0; i <= kExperts; ++i) holders[0][i] = layout::make_word(kEpoch - 90, 1);
  holders[1][last - 1] = layout::make_word(kEpoch, 12);
  holders[2][last] = layout::make_word(kEpoch, header_of(Operation::kCombine));  // no arguments
  const Words whole = holders[0];
  const auto changed = agree_on_announcement(spans(holders), kEpoch);
  EXPECT_FALSE(changed[0]);
  EXPECT_EQ(holders[0], whole);
  EXPECT_NE(layout::epoch_of(holders[1][last - 1]), kEpoch);
  EXPECT_NE(layout::epoch_of(holders[2][last]), kEpoch);
}

TEST(Announcement, WordsOfLongAgoSayNothing) {
  std::vector<Words> holders{announced(Operation::kDispatch, kEpoch - 100),
                             announced(Operation::kDispatch, kEpoch + 0x80000000U)};
  const std::vector<Words> before = holders;
  agree_on_announcement(spans(holders), kEpoch);
  EXPECT_EQ(holders, before);
  EXPECT_FALSE(newest_announced(spans(holders), kEpoch));
}

// Whatever of it came to whom: all end alike, and doing it again, from the middle too, changes
// nothing.
TEST(Announcement, AnyPartsEndAlike) {
  std::mt19937 random(1);
  const Words whole = announced(Operation::kDispatch, kEpoch);
  for (int turn = 0; turn < 2000; ++turn) {
    std::vector<Words> holders(3, nothing());
    bool one_is_whole = false;
    for (Words& words : holders) {
      const bool has_all = random() % 4 == 0;
      for (std::size_t i = 0; i < words.size(); ++i) {
        if (has_all || random() % 2 == 0) words[i] = whole[i];
      }
      one_is_whole = one_is_whole || words == whole;
    }
    const std::vector<Words> at_first = holders;
    agree_on_announcement(spans(holders), kEpoch);
    for (const Words& words : holders) {
      if (one_is_whole) {
        EXPECT_EQ(words, whole);
      } else {
        for (const layout::Word word : words) EXPECT_NE(layout::epoch_of(word), kEpoch);
      }
    }
    // Another who did the same has come half way.
    std::vector<Words> half_way = at_first;
    for (std::size_t holder = 0; holder < half_way.size(); ++holder) {
      for (std::size_t i = 0; i < whole.size(); ++i) {
        if (random() % 2 == 0) half_way[holder][i] = holders[holder][i];
      }
    }
    agree_on_announcement(spans(half_way), kEpoch);
    for (std::size_t holder = 0; holder < half_way.size(); ++holder) {
      for (std::size_t i = 0; i < whole.size(); ++i) {
        const bool is_of_it = layout::epoch_of(half_way[holder][i]) == kEpoch;
        EXPECT_EQ(is_of_it, one_is_whole) << "seed 1, turn " << turn;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::cuda
