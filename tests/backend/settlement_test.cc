// What each does for its own block comes to what one does for all blocks (announcement_test.cc).
#include "backend/cuda/settlement.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::cuda {
namespace {

using layout::Epoch;
using Words = std::vector<layout::Word>;

constexpr Epoch kEpoch = 1;  // the ones before have wrapped

// Counts, number of blocks, arguments, header, as of `epoch`.
Words announced(Operation operation, Epoch epoch, std::uint32_t num_blocks = 2) {
  const std::uint32_t header =
      layout::encode(layout::Header{.operation = operation, .half = 1, .hash = 77});
  Words words;
  for (const std::uint32_t value : {5U, 0U, 9U, num_blocks, 10U, 11U, 12U, header}) {
    words.push_back(layout::make_word(epoch, value));
  }
  return words;
}

// Of the parity of kEpoch; the other one is an operation before that all have.
Holding holding(Words words) {
  Holding result;
  result.words[layout::parity(kEpoch)] = std::move(words);
  result.words[1 - layout::parity(kEpoch)] = announced(Operation::kCombine, kEpoch - 1);
  return result;
}

Words applied(const Settlement& settlement, Words own) {
  static_cast<void>(apply(settlement, layout::parity(kEpoch), own, kEpoch));
  return own;
}

TEST(Settlement, IsWhatAllBlocksTogetherWouldGet) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 4000; ++turn) {
    const Operation operation = turn % 2 == 0 ? Operation::kDispatch : Operation::kCombine;
    const Words whole = announced(operation, kEpoch);
    std::vector<Words> blocks(3, announced(Operation::kDispatch, kEpoch - 2));
    std::vector<Holding> holders;
    for (Words& words : blocks) {
      const bool has_all = random() % 4 == 0;
      for (std::size_t i = 0; i < words.size(); ++i) {
        // A combine announces no counts.
        if (operation == Operation::kCombine && i < 4) continue;
        if (has_all || random() % 2 == 0) words[i] = whole[i];
      }
      holders.push_back(holding(words));
    }
    std::vector<Words> expected = blocks;
    std::vector<Announcement> spans(expected.begin(), expected.end());
    const auto newest = newest_announced(spans, kEpoch);
    agree_on_announcement(spans, kEpoch);

    const Settlement settlement = settle(holders, kEpoch);
    EXPECT_EQ(settlement.end, newest == kEpoch ? kEpoch + 1 : kEpoch);  // kEpoch - 1 has come
    const auto travelled = decode_settlement(encode(settlement, whole.size()), whole.size());
    ASSERT_TRUE(travelled);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_EQ(applied(*travelled, blocks[i]), expected[i]) << "turn " << turn;
      EXPECT_EQ(applied(*travelled, expected[i]), expected[i]) << "once more";
    }
  }
}

// Over the network rows have one arrival word, in shared memory one for each block of the sender.
TEST(Settlement, WhoeverHasADispatchWholeKeepsItsNumberOfBlocks) {
  const Words here = announced(Operation::kDispatch, kEpoch, 32);
  const Words there = announced(Operation::kDispatch, kEpoch, 1);
  const Settlement settlement = settle({holding(there), holding(here)}, kEpoch);
  EXPECT_EQ(applied(settlement, here), here);
  EXPECT_EQ(applied(settlement, there), there);
}

TEST(Settlement, OfARankThatHasAnnouncedNothingEndsBeforeTheOperation) {
  const Words old = announced(Operation::kDispatch, kEpoch - 100);
  Holding holder;
  holder.words[0] = holder.words[1] = old;
  const Settlement settlement = settle({holder, holder}, kEpoch);
  EXPECT_EQ(settlement.end, kEpoch - 1);
  EXPECT_EQ(applied(settlement, old), old);
}

TEST(Settlement, OfSeveralRanksFollowEachOther) {
  const Words old = announced(Operation::kDispatch, kEpoch - 2);
  const Words whole = announced(Operation::kDispatch, kEpoch);
  const Words other = announced(Operation::kCombine, kEpoch + 5);
  const std::size_t size = whole.size();
  // Two lost ranks, of one of which a survivor has more; by rank and parity.
  const auto join = [](std::initializer_list<Words> parts) {
    Words all;
    for (const Words& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const std::vector<Words> told{join({other, old, other, other}), join({old, whole, other, other})};
  const Epoch near[] = {kEpoch, kEpoch + 5};
  const auto settled = settle_all(told, near, size);
  ASSERT_TRUE(settled);
  Holding first;
  first.words[0] = other;
  first.words[1] = old;
  Holding second;
  second.words[0] = old;
  second.words[1] = whole;
  Holding both;
  both.words[0] = both.words[1] = other;
  EXPECT_EQ(*settled, join({encode(settle({first, second}, near[0]), size),
                            encode(settle({both, both}, near[1]), size)}));
  std::vector<Words> wrong = told;
  wrong[1].pop_back();
  EXPECT_FALSE(settle_all(wrong, near, size));
  EXPECT_FALSE(settle_all(told, std::span(near).first(1), size));
}

TEST(Settlement, OfAnotherSizeIsNotRead) {
  const Words whole = announced(Operation::kDispatch, kEpoch);
  const Words words = encode(settle({holding(whole)}, kEpoch), whole.size());
  for (std::size_t size = 0; size < words.size(); ++size) {
    EXPECT_FALSE(decode_settlement(std::span(words).first(size), whole.size()));
  }
  EXPECT_FALSE(decode_settlement(words, whole.size() + 1));
}

}  // namespace
}  // namespace tandem::cuda
