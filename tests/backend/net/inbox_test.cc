// What peers on other hosts may make of this rank's memory: what lies in its block, and nothing
// else.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "backend/net/batch.h"
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
  bool receive(const std::vector<std::byte>& payload, MessageKind kind = MessageKind::kWords,
               layout::Epoch epoch = 0) {
    BufferHeader header{};
    header.sequence = sequence_++;
    header.kind = static_cast<std::uint32_t>(kind);
    header.epoch = epoch;
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

std::vector<std::byte> coming(std::uint32_t start, layout::Epoch next) {
  const layout::Word word = layout::make_word(start, next);
  const auto bytes = std::as_bytes(std::span(&word, 1));
  return {bytes.begin(), bytes.end()};
}

// Or rows of an operation that has failed could be written over those of a later one.
TEST_F(InboxTest, APeerHasComeToRecoverOnceAllThatItSentBeforeIsThere) {
  sequence_ = 1;
  EXPECT_TRUE(receive(coming(1, 40), MessageKind::kRecover));
  EXPECT_FALSE(inbox_->has_come(1, 1));
  sequence_ = 0;
  EXPECT_TRUE(receive(words(8, 2, 2)));
  EXPECT_EQ(inbox_->has_come(1, 1), 40U);
  // The next time, which it may have come to before this rank has left the last.
  EXPECT_FALSE(inbox_->has_come(1, 2));
  sequence_ = 2;
  EXPECT_TRUE(receive(coming(2, 50), MessageKind::kRecover));
  EXPECT_EQ(inbox_->has_come(1, 1), 40U);
  EXPECT_EQ(inbox_->has_come(1, 2), 50U);
}

std::vector<std::byte> failure(std::uint32_t start, const char* message) {
  const auto head = std::as_bytes(std::span(&start, 1));
  std::vector<std::byte> payload(head.begin(), head.end());
  const auto encoded = runtime::encode({.info = {.code = ErrorCode::kTimeout}, .message = message});
  payload.insert(payload.end(), encoded.begin(), encoded.end());
  return payload;
}

TEST_F(InboxTest, AFailureIsOfTheTimeBetweenTwoNewStarts) {
  EXPECT_FALSE(inbox_->failed_since(0));
  EXPECT_TRUE(receive(failure(0, "first"), MessageKind::kFailure));
  EXPECT_TRUE(receive(failure(0, "another"), MessageKind::kFailure));
  EXPECT_TRUE(receive(coming(1, 40), MessageKind::kRecover));
  EXPECT_TRUE(inbox_->failed_since(0));
  EXPECT_EQ(inbox_->failure()->message, "first");
  EXPECT_FALSE(inbox_->failed_since(1));
  EXPECT_TRUE(receive(failure(1, "second"), MessageKind::kFailure));
  EXPECT_TRUE(inbox_->failed_since(1));
  EXPECT_EQ(inbox_->failure()->message, "second");
  EXPECT_TRUE(receive(std::vector<std::byte>(3), MessageKind::kFailure)) << "too short: dropped";
}

// To which new starts its peers have come, a process that joins has not heard.
TEST_F(InboxTest, AFailureSaysBehindWhichNewStartItIs) {
  EXPECT_TRUE(receive(failure(2, "told"), MessageKind::kFailure));
  EXPECT_TRUE(receive(coming(3, 40), MessageKind::kRecover));
  EXPECT_TRUE(inbox_->failed_since(2));
  EXPECT_EQ(inbox_->failure()->message, "told");
  EXPECT_FALSE(inbox_->failed_since(3));
}

// A word of an operation, at offset 8.
std::vector<std::byte> word_of(layout::Epoch epoch) {
  const RunHeader run{.offset = 8, .count = 1};
  const layout::Word word = layout::make_word(epoch, 1);
  std::vector<std::byte> payload(sizeof run + sizeof word);
  std::memcpy(payload.data(), &run, sizeof run);
  std::memcpy(payload.data() + sizeof run, &word, sizeof word);
  return payload;
}

// What a masked peer sends of operations is dropped, and what it sends later comes in its turn.
TEST_F(InboxTest, DropsRowsAndWordsOfAPeerThatIsShutOut) {
  const std::vector<std::byte> rows(64, std::byte{9});
  EXPECT_TRUE(receive(rows, MessageKind::kToLanding, 5));
  EXPECT_EQ(inbox_->landing(0)[0], std::byte{9});
  inbox_->landing(0)[0] = std::byte{0};
  inbox_->shut(1);
  EXPECT_FALSE(receive(rows, MessageKind::kToLanding, 5));
  EXPECT_EQ(inbox_->landing(0)[0], std::byte{0});
  EXPECT_TRUE(receive(word_of(5)));
  EXPECT_FALSE(block_.first_change());

  // Let in from operation 8 on: what comes of those before it was sent before it was masked.
  inbox_->admit(1, 8);
  EXPECT_FALSE(receive(rows, MessageKind::kToLanding, 7));
  EXPECT_TRUE(receive(word_of(7)));
  EXPECT_FALSE(block_.first_change());
  EXPECT_TRUE(receive(rows, MessageKind::kToLanding, 8));
  EXPECT_EQ(inbox_->landing(0)[0], std::byte{9});
  EXPECT_TRUE(receive(word_of(8)));
  EXPECT_EQ(block_.first_change(), 8);
}

TEST_F(InboxTest, RowsAreBeingReceivedUntilTheyAreThereOrNeverWillBe) {
  BufferHeader header{};
  header.kind = static_cast<std::uint32_t>(MessageKind::kToLanding);
  auto delivery = inbox_->accept(1, std::as_bytes(std::span(&header, 1)), 64);
  inbox_->shut(1);
  EXPECT_TRUE(inbox_->is_receiving(1));
  delivery.reset();
  EXPECT_FALSE(inbox_->is_receiving(1));
}

TEST_F(InboxTest, OfAPeerThatIsMaskedNoFailureIsHeard) {
  inbox_->heed(1, false);
  EXPECT_TRUE(receive(failure(0, "of a part cut off"), MessageKind::kFailure));
  EXPECT_TRUE(receive(coming(1, 40), MessageKind::kRecover));
  EXPECT_FALSE(inbox_->failed_since(0));
  EXPECT_FALSE(inbox_->has_come(1, 1));
  inbox_->heed(1, true);
  EXPECT_TRUE(receive(failure(0, "of all"), MessageKind::kFailure));
  EXPECT_TRUE(inbox_->failed_since(0));
  inbox_->forgive();
  EXPECT_FALSE(inbox_->failed_since(0));
}

TEST_F(InboxTest, NotesComeAtOnceOrInOrder) {
  std::string heard;
  inbox_->listen(
      [&](int source, std::span<const std::byte> text) {
        EXPECT_EQ(source, 1);
        heard += static_cast<char>(text[0]);
      },
      {});
  sequence_ = 1;
  EXPECT_TRUE(receive({std::byte{'b'}}, MessageKind::kNoteInOrder));
  EXPECT_TRUE(receive({std::byte{'a'}}, MessageKind::kNote));
  EXPECT_EQ(heard, "a");
  sequence_ = 0;
  EXPECT_TRUE(receive(words(8, 2, 2)));
  EXPECT_EQ(heard, "ab");
  inbox_->listen({}, {});
  EXPECT_TRUE(receive({std::byte{'c'}}, MessageKind::kNote));
  EXPECT_EQ(heard, "ab");
}

// Of a peer that has gone nothing counts for the process in its place: neither what waited for its
// turn, nor what is still on its way.
TEST_F(InboxTest, AnotherProcessInAPeersPlaceBeginsAnew) {
  std::string heard;
  bool may_come = true;
  inbox_->listen([&](int, std::span<const std::byte> text) { heard += static_cast<char>(text[0]); },
                 [&](int peer, bool was_there) { return peer == 1 && was_there && may_come; });
  BufferHeader header{};
  header.kind = static_cast<std::uint32_t>(MessageKind::kNoteInOrder);
  header.sequence = 1;
  const auto bytes = std::as_bytes(std::span(&header, 1));
  const auto late = inbox_->accept(1, bytes, 1);
  header.kind = static_cast<std::uint32_t>(MessageKind::kToLanding);
  auto rows = inbox_->accept(1, bytes, 64);
  sequence_ = 2;
  EXPECT_TRUE(receive({std::byte{'x'}}, MessageKind::kNoteInOrder));
  EXPECT_EQ(inbox_->next_to(1), 0U);
  EXPECT_EQ(inbox_->next_to(1), 1U);

  EXPECT_FALSE(inbox_->let_come(1, true)) << "it is there";
  inbox_->peer_lost(1);
  EXPECT_FALSE(inbox_->let_come(1, true)) << "its rows are";
  rows.reset();
  may_come = false;
  EXPECT_FALSE(inbox_->let_come(1, true)) << "somebody objects";
  may_come = true;
  EXPECT_TRUE(inbox_->let_come(1, true));
  EXPECT_FALSE(inbox_->is_lost(1));
  EXPECT_EQ(inbox_->next_to(1), 0U);

  *late->where = std::byte{'y'};
  late->done();
  sequence_ = 0;
  EXPECT_TRUE(receive({std::byte{'a'}}, MessageKind::kNoteInOrder));
  EXPECT_TRUE(receive({std::byte{'b'}}, MessageKind::kNoteInOrder));
  EXPECT_TRUE(receive({std::byte{'c'}}, MessageKind::kNoteInOrder));
  EXPECT_EQ(heard, "abc");
}

// What it says of operations is not for it to say before it is let in.
TEST_F(InboxTest, AnotherProcessInAPeersPlaceIsShutOutUntilItIsLetIn) {
  EXPECT_TRUE(receive(coming(1, 40), MessageKind::kRecover));
  EXPECT_TRUE(receive(coming(2, 50), MessageKind::kRecover));
  inbox_->listen([](int, std::span<const std::byte>) {}, [](int, bool) { return true; });
  inbox_->peer_lost(1);
  inbox_->shut(1);
  EXPECT_TRUE(inbox_->let_come(1, true));
  EXPECT_FALSE(inbox_->has_come(1, 1) || inbox_->has_come(1, 2));
  sequence_ = 0;
  EXPECT_TRUE(receive(word_of(8)));
  EXPECT_FALSE(block_.first_change());
  inbox_->admit(1, 8);
  EXPECT_TRUE(receive(word_of(8)));
  EXPECT_EQ(block_.first_change(), 8);
}

TEST_F(InboxTest, APeerThatRecoversAloneIsAFailure) {
  EXPECT_TRUE(receive(coming(1, 40), MessageKind::kRecover));
  EXPECT_TRUE(inbox_->failed_since(0));
  EXPECT_EQ(inbox_->failure()->message, "rank 1 has called recover()");
  EXPECT_FALSE(inbox_->failed_since(1));
}

// Rows go where a carrier brings them, or the receiver itself.
TEST_F(InboxTest, WritesNoRowIntoTheBlock) {
  EXPECT_FALSE(receive(std::vector<std::byte>(32), MessageKind::kToBlock));
  EXPECT_FALSE(block_.first_change());
}

TEST_F(InboxTest, TakesNoMemoryForWordsThatCannotBe) {
  const BufferHeader header{};
  EXPECT_FALSE(
      inbox_->accept(1, std::as_bytes(std::span(&header, 1)), std::size_t{1} << 40).has_value());
}

std::vector<std::byte> in_batch(const Frame& frame, std::size_t bytes) {
  std::vector<std::byte> part(sizeof frame + bytes, std::byte{5});
  std::memcpy(part.data(), &frame, sizeof frame);
  return part;
}

// The payload of each message that is taken.
std::vector<std::size_t> taken(const std::vector<std::byte>& batch) {
  std::vector<std::size_t> sizes;
  for_each_in_batch(batch, [&](std::uint32_t channel, std::span<const std::byte> header,
                               std::span<const std::byte> payload) {
    EXPECT_EQ(channel, 3U);
    EXPECT_EQ(header.size(), 8U);
    sizes.push_back(payload.size());
  });
  return sizes;
}

TEST(Batch, MessagesAreTakenUpToTheFirstThatIsNotWhole) {
  std::vector<std::byte> batch =
      in_batch({.channel = 3, .header_bytes = 8, .payload_bytes = 24}, 32);
  const auto empty = in_batch({.channel = 3, .header_bytes = 8, .payload_bytes = 0}, 8);
  batch.insert(batch.end(), empty.begin(), empty.end());
  EXPECT_EQ(taken(batch), (std::vector<std::size_t>{24, 0}));
  const std::size_t whole = batch.size();
  batch.insert(batch.end(), empty.begin(), empty.end());
  for (std::size_t size = whole; size < batch.size(); ++size) {
    EXPECT_EQ(taken({batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(size)}),
              (std::vector<std::size_t>{24, 0}));
  }
  for (const std::uint64_t lie : {std::uint64_t{1}, UINT64_MAX, UINT64_MAX - 7}) {
    EXPECT_TRUE(
        taken(in_batch({.channel = 3, .header_bytes = 8, .payload_bytes = lie}, 8)).empty());
  }
  EXPECT_TRUE(taken(in_batch({.channel = 3, .header_bytes = 9, .payload_bytes = 0}, 8)).empty());
}

// Notes what it is to carry, in the order of the calls.
class Notes final : public runtime::Carrier {
 public:
  std::byte* room(int, layout::Epoch epoch, std::int64_t size_bytes) override {
    return epoch == 7 && size_bytes <= std::ssize(room_) ? room_.data() : nullptr;
  }
  std::byte* landing() override { return landing_.data(); }
  void carry_to_block(const Rows& rows) override {
    note("rows " + std::to_string(rows.size_bytes) + " at " + std::to_string(rows.offset));
    note("sources " + std::to_string(rows.sources_bytes) + " at " +
         std::to_string(rows.sources_offset));
    EXPECT_EQ(rows.room, room_.data());
  }
  void carry_to_landing(std::int64_t offset, std::int64_t size_bytes) override {
    note("landing " + std::to_string(size_bytes) + " at " + std::to_string(offset));
  }
  void carry_words(int source, std::int64_t offset, std::span<const layout::Word> words) override {
    note(std::to_string(words.size()) + " words of " + std::to_string(source) + " at " +
         std::to_string(offset));
  }
  void lost(int peer) override { note("lost " + std::to_string(peer)); }

  std::vector<std::string> notes;

 private:
  void note(const std::string& text) { notes.push_back(text); }

  std::vector<std::byte> room_ = std::vector<std::byte>(64);
  std::vector<std::byte> landing_ = std::vector<std::byte>(2 * 4096);
};

class CarriedInboxTest : public testing::Test {
 protected:
  CarriedInboxTest()
      : carrier_(std::make_shared<Notes>()),
        inbox_(std::make_shared<Inbox>(runtime::RemoteMemory{.block = nullptr,
                                                             .block_bytes = kBlockBytes,
                                                             .control_bytes = kControlBytes,
                                                             .staging_bytes = 0,
                                                             .landing_bytes = 4096,
                                                             .wake = [] {},
                                                             .carrier = carrier_},
                                       2)) {}

  std::optional<Receiver::Delivery> accept(const BufferHeader& header, std::size_t payload_bytes) {
    std::vector<std::byte> bytes(sizeof header + header.num_sources * sizeof(std::int32_t));
    std::memcpy(bytes.data(), &header, sizeof header);
    return inbox_->accept(1, bytes, payload_bytes);
  }

  static BufferHeader rows(std::uint64_t sequence, MessageKind kind) {
    return {.sequence = sequence,
            .kind = static_cast<std::uint32_t>(kind),
            .num_sources = kind == MessageKind::kToBlock ? 2U : 0U,
            .offset = 4112,
            .sources_offset = 4096,
            .epoch = 7,
            .zero = 0};
  }

  std::shared_ptr<Notes> carrier_;
  std::shared_ptr<Inbox> inbox_;
};

TEST_F(CarriedInboxTest, CarriesRowsAndWordsInTheOrderSentWhateverArrivesFirst) {
  BufferHeader words{};
  words.sequence = 2;
  const auto last = accept(words, sizeof(RunHeader) + 16);
  const RunHeader run{.offset = 8, .count = 2};
  std::memcpy(last->where, &run, sizeof run);
  last->done();
  const auto second = accept(rows(1, MessageKind::kToLanding), 48);
  EXPECT_EQ(second->where, carrier_->landing() + 4112);
  second->done();
  EXPECT_TRUE(carrier_->notes.empty());
  accept(rows(0, MessageKind::kToBlock), 32)->done();
  inbox_->peer_lost(1);
  const std::vector<std::string> expected = {"rows 32 at 4112", "sources 8 at 4096",
                                             "landing 48 at 4112", "2 words of 1 at 8", "lost 1"};
  EXPECT_EQ(carrier_->notes, expected);
}

// They may have come whole, but behind something that has not.
TEST_F(CarriedInboxTest, CarriesNoRowsOfOperationsBeforeThoseThatAreTakenBy) {
  accept(rows(1, MessageKind::kToLanding), 48)->done();
  accept(rows(2, MessageKind::kToBlock), 32)->done();
  inbox_->admit(1, 8);
  EXPECT_FALSE(accept(rows(0, MessageKind::kToBlock), 32));
  EXPECT_TRUE(carrier_->notes.empty());
  inbox_->admit(1, 7);
  accept(rows(3, MessageKind::kToLanding), 48)->done();
  EXPECT_EQ(carrier_->notes, (std::vector<std::string>{"landing 48 at 4112"}));
}

TEST_F(CarriedInboxTest, DropsRowsThatTheCarrierHasNoRoomFor) {
  EXPECT_FALSE(accept(rows(0, MessageKind::kToBlock), 64).has_value());
  EXPECT_TRUE(accept(rows(0, MessageKind::kToBlock), 56).has_value());
}

TEST_F(CarriedInboxTest, DropsSourceTokensOfRowsThatHaveNone) {
  BufferHeader header = rows(0, MessageKind::kToLanding);
  header.num_sources = 1;
  EXPECT_FALSE(accept(header, 16).has_value());
}

}  // namespace
}  // namespace tandem::net
