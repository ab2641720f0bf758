// What a process hears that is to become a rank of a running buffer. (What it hears from hostile
// peers is for the fuzzer.)
#include "backend/net/invitation.h"

#include <gtest/gtest.h>

#include "runtime/situation.h"

namespace tandem::net {
namespace {

std::vector<std::byte> bytes(std::size_t size) {
  return std::vector<std::byte>(size, std::byte{5});
}

TEST(Invitation, IsHeardAsItWasTold) {
  const Invitation told{
      .channel = 3,
      .book = {{.rank = 0, .token = 11, .address = bytes(7)},
               {.rank = 2, .token = 12, .address = bytes(9)}},
      .situation = runtime::encode(runtime::Situation{.teller = 2,
                                                      .number = 8,
                                                      .num_starts = 1,
                                                      .near = 0xfffffffeU,
                                                      .active = {true, false, true},
                                                      .from = {1, 2, 0xfffffff0U},
                                                      .options = "max_topk 2\n"})};
  const auto heard = decode_invitation(encode(told));
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->channel, 3U);
  ASSERT_EQ(heard->book.size(), 2U);
  EXPECT_EQ(heard->book[1].rank, 2);
  EXPECT_EQ(heard->book[1].token, 12U);
  EXPECT_EQ(heard->book[1].address, bytes(9));
  const auto situation = runtime::decode_situation(heard->situation);
  ASSERT_TRUE(situation);
  EXPECT_EQ(situation->teller, 2);
  EXPECT_EQ(situation->number, 8U);
  EXPECT_EQ(situation->num_starts, 1U);
  EXPECT_EQ(situation->near, 0xfffffffeU);
  EXPECT_EQ(situation->active, (std::vector{true, false, true}));
  EXPECT_EQ(situation->from, (std::vector<layout::Epoch>{1, 2, 0xfffffff0U}));
  EXPECT_EQ(situation->options, "max_topk 2\n");
}

TEST(Invitation, WithARankTwiceOrNoneAtAllIsNone) {
  const auto is_refused = [](const AddressBook& book) { return !decode_book(encode(book)); };
  EXPECT_FALSE(is_refused({{.rank = 1, .token = 1, .address = bytes(4)}}));
  EXPECT_TRUE(is_refused({{.rank = 1, .token = 1, .address = bytes(4)},
                          {.rank = 1, .token = 2, .address = bytes(4)}}));
  EXPECT_TRUE(is_refused({{.rank = -1, .token = 1, .address = bytes(4)}}));
  EXPECT_TRUE(is_refused({{.rank = 4096, .token = 1, .address = bytes(4)}}));
  EXPECT_TRUE(is_refused({{.rank = 1, .token = 1, .address = {}}}));
}

}  // namespace
}  // namespace tandem::net
