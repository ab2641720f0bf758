// Control words: what goes in comes out, and epochs compare across their wrap.
#include "layout/control_word.h"

#include <gtest/gtest.h>

namespace tandem::layout {
namespace {

TEST(ControlWord, KeepsEpochAndValueApart) {
  for (const Epoch epoch : {0U, 1U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    for (const std::uint32_t value : {0U, 1U, 0x80000000U, 0xffffffffU}) {
      const Word word = make_word(epoch, value);
      EXPECT_EQ(epoch_of(word), epoch);
      EXPECT_EQ(value_of(word), value);
    }
  }
}

TEST(ControlWord, EpochsCompareAcrossTheWrap) {
  for (const Epoch epoch : {0U, 1U, 2U, 0x7fffffffU, 0x80000000U, 0xfffffffeU, 0xffffffffU}) {
    for (Epoch ahead = 0; ahead <= 3; ++ahead) {
      EXPECT_TRUE(has_reached(epoch + ahead, epoch));
      EXPECT_EQ(has_reached(epoch, epoch + ahead), ahead == 0);
    }
  }
}

// Two sets of words suffice only if neighbours in the sequence, over the wrap too, take both.
TEST(ControlWord, ParityAlternatesAcrossTheWrap) {
  for (const Epoch epoch : {0U, 1U, 0x7fffffffU, 0xffffffffU}) {
    EXPECT_NE(parity(epoch), parity(epoch + 1));
  }
}

TEST(ControlWord, HeaderSurvivesTheRoundTrip) {
  for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
    for (const int half : {0, 1}) {
      for (const std::uint32_t hash : {0U, 1U, 0xabcdef1U, kHashMask}) {
        const Header header = decode_header(encode(Header{operation, half, hash}));
        EXPECT_EQ(header.operation, operation);
        EXPECT_EQ(header.half, half);
        EXPECT_EQ(header.hash, hash);
      }
    }
  }
}

TEST(ControlWord, ShapeSurvivesTheRoundTripUpToItsLimits) {
  for (const int hidden : {1, 7168, kMaxHidden}) {
    for (const int topk : {1, 33, kMaxTopk}) {
      for (std::uint32_t element = 0; element < 6; ++element) {
        for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
          for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
            const bool partial_sums = layout == Layout::kPacked && element == 0;
            const ShapeArgument shape = decode_shape(
                encode(ShapeArgument{hidden, topk, element, placement, layout, partial_sums}));
            EXPECT_EQ(shape.partial_sums, partial_sums);
            EXPECT_EQ(shape.hidden, hidden);
            EXPECT_EQ(shape.topk, topk);
            EXPECT_EQ(shape.element, element);
            EXPECT_EQ(shape.placement, placement);
            EXPECT_EQ(shape.layout, layout);
          }
        }
      }
    }
  }
}

// Before its epoch a pending change does not hold yet, across the wrap too; one that is no longer
// pending holds however old it is.
TEST(ControlWord, RosterWordSaysWhoTakesPartSinceWhen) {
  for (const Epoch from : {Epoch{4}, Epoch{0}, Epoch{0xffffffffU}}) {
    for (const bool masked : {false, true}) {
      const Word word = make_word(from, kRosterPending | (masked ? kRosterMasked : 0));
      EXPECT_EQ(takes_part(word, from - 1), masked);
      EXPECT_EQ(takes_part(word, from), !masked);
      EXPECT_EQ(takes_part(word, from + 1), !masked);
      EXPECT_FALSE(has_settled(word, from + 1));
      EXPECT_TRUE(has_settled(word, from + 2));
      const Word old = settled(word);
      EXPECT_EQ(settled(old), old);
      for (const Epoch epoch : {from - 1, from, from + (1U << 31), from + (3U << 30)}) {
        EXPECT_EQ(takes_part(old, epoch), !masked);
        EXPECT_TRUE(has_settled(old, epoch));
      }
    }
  }
}

// A call that differs from its peers' in one argument is told apart.
TEST(ControlWord, HashTellsACallWithOneOtherArgument) {
  constexpr std::uint32_t kTokens = 128;
  constexpr std::uint32_t kShape = 7168U | 8U << 17;
  constexpr std::uint32_t kAlignment = 1;
  const std::uint32_t base = hash_arguments({kTokens, kShape, kAlignment});
  EXPECT_LE(base, kHashMask);
  for (std::uint32_t change = 1; change < 100'000; ++change) {
    ASSERT_NE(hash_arguments({kTokens ^ change, kShape, kAlignment}), base) << change;
    ASSERT_NE(hash_arguments({kTokens, kShape ^ change, kAlignment}), base) << change;
    ASSERT_NE(hash_arguments({kTokens, kShape, kAlignment ^ change}), base) << change;
  }
  for (int bit = 0; bit < 32; ++bit) {
    ASSERT_NE(hash_arguments({kTokens, kShape ^ (1U << bit), kAlignment}), base) << bit;
  }
}

}  // namespace
}  // namespace tandem::layout
