// What peers on other hosts may make of this rank's memory: what lies in its block, and nothing
// else.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "backend/net/remote_link.h"
#include "support/guarded_block.h"

namespace tandem::net {
namespace {

constexpr std::int64_t kBlockBytes = 8192;
constexpr std::int64_t kControlBytes = 4096;

class InboxTest : public testing::Test {
 protected:
  InboxTest()
      : block_(kBlockBytes),
        inbox_(std::make_shared<Inbox>(runtime::RemoteMemory{.block = block_.memory(),
                                                             .block_bytes = kBlockBytes,
                                                             .control_bytes = kControlBytes,
                                                             .staging_bytes = 0,
                                                             .landing_bytes = 4096,
                                                             .wake = [] {}},
                                       2)) {
    block_.remember();
  }

  // Words, as the next message of a peer. Was it taken?
  bool receive(const std::vector<std::byte>& payload) {
    BufferHeader header{};
    header.sequence = sequence_++;
    const auto bytes = std::as_bytes(std::span(&header, 1));
    const auto delivery = inbox_->accept(1, bytes, payload.size());
    if (!delivery) return false;
    std::memcpy(delivery->where, payload.data(), payload.size());
    delivery->done();
    return true;
  }

  static std::vector<std::byte> words(std::int64_t offset, std::int64_t count, int sent) {
    std::vector<std::byte> payload(sizeof(RunHeader) + sent * sizeof(layout::Word), std::byte{7});
    const RunHeader run{.offset = offset, .count = count};
    std::memcpy(payload.data(), &run, sizeof run);
    return payload;
  }

  test::GuardedBlock block_;
  std::shared_ptr<Inbox> inbox_;
  std::uint64_t sequence_ = 0;
};

TEST_F(InboxTest, StoresWordsWhereTheyAreToGo) {
  EXPECT_TRUE(receive(words(8, 2, 2)));
  EXPECT_EQ(block_.first_change(), 8);
  block_.allow(8, 24);
  EXPECT_FALSE(block_.first_change());
}

TEST_F(InboxTest, StoresNoRunWhoseLengthIsNotThatOfWhatCame) {
  // Eight times the first is nothing in 64 bits.
  for (const std::int64_t count :
       {std::int64_t{1} << 61, INT64_MAX, INT64_MIN, std::int64_t{-1}, std::int64_t{3}}) {
    EXPECT_TRUE(receive(words(0, count, 2))) << count;
    EXPECT_FALSE(block_.first_change()) << count;
  }
}

TEST_F(InboxTest, StoresNoWordBeyondTheControlWords) {
  for (const std::int64_t offset :
       {kControlBytes, kControlBytes - 8, std::int64_t{-8}, std::int64_t{4}, INT64_MAX - 7}) {
    EXPECT_TRUE(receive(words(offset, 2, 2))) << offset;
    EXPECT_FALSE(block_.first_change()) << offset;
  }
}

// A message before it that never comes.
TEST_F(InboxTest, IsNotKeptByWhatWaitsForItsTurn) {
  sequence_ = 1;
  EXPECT_TRUE(receive(words(8, 2, 2)));
  const std::weak_ptr<Inbox> inbox = inbox_;
  inbox_.reset();
  EXPECT_TRUE(inbox.expired());
}

TEST_F(InboxTest, TakesNoMemoryForWordsThatCannotBe) {
  const BufferHeader header{};
  EXPECT_FALSE(
      inbox_->accept(1, std::as_bytes(std::span(&header, 1)), std::size_t{1} << 40).has_value());
}

}  // namespace
}  // namespace tandem::net
