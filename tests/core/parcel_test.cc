// Lists of two ranks with two experts each, what they say of places, and lists that contradict
// their counts.
#include "core/parcel.h"

#include <gtest/gtest.h>

#include <bit>
#include <climits>
#include <vector>

#include "core/receive_plan.h"

namespace tandem::core {
namespace {

const ExpertMap kExperts = ExpertMap::contiguous(4, 2);  // rank 1 owns 2 and 3
constexpr int kMostRows = 5;
constexpr int kTopk = 3;

class ParcelTest : public testing::Test {
 protected:
  // Rows that ranks 0 and 1 send to experts 0 to 3, as rank 1 receives them from rank 0.
  explicit ParcelTest(const std::vector<std::int32_t>& counts = {1, 0, 2, 3, 4, 1, 0, 1})
      : begin_(4), counts_(2), offsets_(3), ranges_(4) {
    EXPECT_FALSE(plan_rows(counts, kExperts,
                           {.layout = Layout::kPacked,
                            .max_tokens = kMostRows,
                            .topk = kTopk,
                            .row_alignment = 4,
                            .capacity_rows = 100},
                           1, begin_, {counts_, offsets_, ranges_}));
  }

  bool find(std::vector<std::int32_t> list) {
    list.insert(list.begin() + 1, first_part_);
    // Rows without a place follow, one more than there may be.
    while (list.size() < 2 + (kMostRows + 1) * (1 + kTopk)) {
      list.push_back(list.size() % (1 + kTopk) == 2 ? 0 : -1);
    }
    return find_places(list, {.max_tokens = kMostRows, .topk = kTopk, .source = 0, .rank = 1},
                       kExperts, {offsets_, ranges_}, found_);
  }

  std::vector<std::int64_t> begin_;
  std::vector<std::int32_t> counts_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> ranges_;
  ParcelPlaces found_;
  std::int32_t first_part_ = 0;
};

TEST_F(ParcelTest, ARowGoesToAPlaceOfEachOfItsExpertsHere) {
  // Token 1 names expert 3 twice; experts 0 and 1 are rank 0's.
  ASSERT_TRUE(find({3, 0, 2, -1, 3, 1, 3, 0, 3, 4, 1, 2, -1}));
  EXPECT_EQ(found_.tokens, (std::vector<std::int32_t>{0, 1, 4}));
  EXPECT_EQ(found_.first, (std::vector<std::int64_t>{0, 2, 4, 5}));
  // Expert 2 begins at row 0, expert 3 at row 4.
  EXPECT_EQ(found_.places, (std::vector<std::int64_t>{0, 4, 5, 6, 1}));
}

TEST_F(ParcelTest, NothingIsLeftOfTheListBefore) {
  ASSERT_TRUE(find({3, 0, 2, -1, 3, 1, 3, 0, 3, 4, 1, 2, -1}));
  ASSERT_TRUE(find({2, 0, 2, 2, 3, 3, 3, 3, 1}));
  EXPECT_EQ(found_.tokens, (std::vector<std::int32_t>{0, 3}));
  EXPECT_EQ(found_.places, (std::vector<std::int64_t>{0, 1, 4, 5, 6}));
}

TEST_F(ParcelTest, AListThatContradictsTheCountsIsRefused) {
  EXPECT_FALSE(find({0}));
  EXPECT_FALSE(find({2, 0, 2, 2, 3, 3, 3, -1, 1}));  // one row for expert 3 too few
  EXPECT_FALSE(find({2, 0, 2, 2, 3, 3, 3, 3, 3}));   // one too many
  EXPECT_FALSE(find({2, 0, 2, 2, 2, 3, 3, 3, 3}));   // one too many for expert 2
}

TEST_F(ParcelTest, ARowWithoutAPlaceIsRefused) {
  ASSERT_TRUE(find({3, 0, 2, -1, 3, 1, 3, 3, -1, 2, 2, 0, 1}));
  EXPECT_FALSE(find({4, 0, 2, -1, 3, 1, 3, 3, -1, 2, 2, 0, 1, 4, 0, 1, -1}));
}

TEST_F(ParcelTest, AWeightGoesWithEachPlace) {
  const auto bits = [](float weight) { return std::bit_cast<std::int32_t>(weight); };
  std::vector<std::int32_t> list = {2,        7, 0, 2, -1, 3,       bits(0.5F), bits(8),
                                    bits(-2), 4, 3, 3, 2,  bits(1), bits(2),    bits(4)};
  list.resize(2 + kMostRows * (1 + 2 * kTopk));
  ASSERT_TRUE(find_places(
      list, {.max_tokens = kMostRows, .topk = kTopk, .has_weights = true, .source = 0, .rank = 1},
      kExperts, {offsets_, ranges_}, found_));
  EXPECT_EQ(found_.tokens, (std::vector<std::int32_t>{0, 4}));
  EXPECT_EQ(found_.places, (std::vector<std::int64_t>{0, 4, 5, 6, 1}));
  EXPECT_EQ(found_.weights, (std::vector<float>{0.5F, -2, 1, 2, 4}));
  EXPECT_EQ(found_.first_part, 7);
}

TEST_F(ParcelTest, WhatThereIsNotIsRefused) {
  EXPECT_TRUE(find({2, 0, 2, 2, 3, 4, 3, 3, INT_MIN}));
  for (const std::int32_t number : {4, INT_MAX}) {
    EXPECT_FALSE(find({2, 0, 2, 2, 3, 4, 3, 3, number})) << "an expert";
  }
  for (const std::int32_t number : {kMostRows, -1, INT_MAX, INT_MIN}) {
    EXPECT_FALSE(find({2, 0, 2, 2, 3, number, 3, 3, -1})) << "a token";
  }
  for (const std::int32_t number : {kMostRows + 1, -1, INT_MAX, INT_MIN}) {
    EXPECT_FALSE(find({number, 0, 2, 2, 3, 4, 3, 3, -1})) << "a number of rows";
  }
  for (const std::int32_t number : {kMostRows * kTopk - 1, -1, INT_MAX, INT_MIN}) {
    first_part_ = number;
    EXPECT_FALSE(find({2, 0, 2, 2, 3, 4, 3, 3, -1})) << "a place of parts";
  }
  first_part_ = kMostRows * kTopk - 2;
  EXPECT_TRUE(find({2, 0, 2, 2, 3, 4, 3, 3, -1}));
}

}  // namespace
}  // namespace tandem::core
