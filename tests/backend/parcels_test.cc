// One rank and a peer on another host, for which a stand-in for the network answers: what the rank
// sends; and, whatever rows and lists the peer sends, a dispatch puts the rows in their places, or
// fails and writes none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "layout/parcel.h"
#include "runtime/buffer_state.h"
#include "runtime/network.h"
#include "support/guarded_block.h"
#include "tandem/buffer.h"

namespace tandem::cpu {
namespace {

using layout::Word;

constexpr int kPeer = 1;  // of rank 0; expert 0 is rank 0's, expert 1 the peer's
constexpr int kTokens = 3;
constexpr int kTopk = 2;
constexpr int kHidden = 8;
constexpr std::int64_t kPitch = 16;
constexpr layout::Epoch kEpoch = 1;
constexpr int kParity = layout::parity(kEpoch);

// What the peer says: rows for the two experts, and the list of its parcel.
struct Lies {
  std::vector<std::uint32_t> counts;
  std::vector<std::int32_t> list;
};

// What came to the peer's landing memory.
using Sent = std::vector<runtime::RemotePeers::Rows>;

// The peer answers what it is sent: the same arguments, then its counts, its parcel and `arrived`.
class Peer final : public runtime::RemotePeers {
 public:
  Peer(runtime::RemoteMemory memory, const layout::Block& block, Lies lies, Sent& sent)
      : memory_(std::move(memory)),
        block_(block),
        parcel_(block.capacity()),
        lies_(std::move(lies)),
        sent_(&sent),
        staging_(2 * memory_.staging_bytes),
        landing_(2 * memory_.landing_bytes) {}

  std::byte* staging(int parity) override { return &staging_[parity * memory_.staging_bytes]; }
  std::byte* landing(int parity) override { return &landing_[parity * memory_.landing_bytes]; }
  void send_to_block(int, const Rows&, std::span<const std::int32_t>, std::int64_t) override {}
  void send_to_landing(int, const Rows& rows) override { sent_->push_back(rows); }

  void send_words_with_next(int, std::span<const WordRun> runs) override {
    if (runs.size() != 3) return;  // completed
    for (int expert = 0; expert < 2; ++expert) {
      store(block_.count(kParity, kPeer, expert), layout::make_word(kEpoch, lies_.counts[expert]));
    }
    for (int which = 0; which < layout::kNumArguments; ++which) {
      store(block_.argument(kParity, kPeer, static_cast<layout::Argument>(which)),
            runs[1].values[which]);
    }
    store(block_.header(kParity, kPeer), runs[2].values[0]);
  }
  void send_words(int, std::span<const WordRun> runs) override {
    std::byte* const parcel = landing(kParity) + memory_.landing_bytes - parcel_.size_bytes();
    std::memcpy(parcel, lies_.list.data(), lies_.list.size() * sizeof(std::int32_t));
    for (int i = 0; i < kTokens * kPitch; ++i) {
      parcel[parcel_.rows() + i] = static_cast<std::byte>(1 + i / kPitch);
    }
    store(block_.arrived(kParity, kPeer, 0), runs[0].values[0]);
  }

  bool has_left(int, int) const override { return true; }
  std::optional<std::string> lost(int) const override { return {}; }
  void send_failure(const runtime::Failure&) override {}
  bool failed() const override { return false; }
  runtime::Failure failure() const override { return {}; }
  void come_to_recover(layout::Epoch, const std::optional<runtime::Failure>&) override {}
  std::optional<layout::Epoch> has_come_to_recover(int) const override { return {}; }
  void recovered(std::uint32_t) override {}
  void forgive() override {}
  void send_note(Note) override {}
  void send_note_in_order(Note) override {}
  void listen(TakeNote, LetCome) override {}
  std::shared_ptr<void> open_door(int, const std::string&, Describe) override { return nullptr; }
  void say_hello(int) override {}
  bool has_met(int) const override { return true; }
  void heed(int, bool) override {}
  void shut(int) override {}
  void admit(int, std::optional<layout::Epoch>) override {}
  bool is_receiving(int) const override { return false; }
  void progress() override {}
  void rest() override {}
  void leave() override {}

 private:
  void store(std::int64_t offset, Word word) {
    std::atomic_ref(*reinterpret_cast<Word*>(memory_.block.get() + offset)).store(word);
  }

  runtime::RemoteMemory memory_;
  layout::Block block_;
  layout::Parcel parcel_;
  Lies lies_;
  Sent* sent_;
  std::vector<std::byte> staging_;
  std::vector<std::byte> landing_;
};

class TwoHosts final : public test::FakeBootstrap, public runtime::Network {
 public:
  TwoHosts(const test::GuardedBlock& block, const layout::Block& layout, Lies lies, Sent& sent)
      : FakeBootstrap(0, 2),
        board_(0, 1, kEpoch),
        host_(0, {block}, board_.board),
        layout_(layout),
        lies_(std::move(lies)),
        sent_(&sent) {}

  std::vector<int> host_ranks() const override { return {0}; }
  Bootstrap& host() override { return host_; }
  Network* network() override { return this; }
  std::unique_ptr<runtime::RemotePeers> open(runtime::RemoteMemory memory) override {
    return std::make_unique<Peer>(std::move(memory), layout_, lies_, *sent_);
  }

 private:
  test::PeersOnBoard board_;
  test::PlacedBootstrap host_;
  layout::Block layout_;
  Lies lies_;
  Sent* sent_;
};

class Parcels : public testing::TestWithParam<Placement> {
 protected:
  Parcels() : block_(layout_.size_bytes()) {}

  // Unless said otherwise token 0 of rank 0 goes to both ranks, its others nowhere.
  void dispatch(const Lies& lies,
                const std::vector<std::int32_t>& topk_idx = {0, 1, -1, -1, -1, -1}) {
    Buffer buffer(Communicator(std::make_shared<TwoHosts>(block_, layout_, lies, sent_)),
                  options());
    block_.remember();
    const std::vector<bfloat16> x(kTokens * kHidden, bfloat16{0x3f80});
    DispatchOptions call{.placement = GetParam(), .layout = Layout::kPacked};
    recv_x_.assign(kRows * kPitch, std::byte{0});
    if (GetParam() == Placement::kSlotted) {
      call.recv_x = {recv_x_.data(), DType::kBFloat16, {kRows, kHidden}};
    }
    const DispatchResult result = buffer.dispatch(view_of(x.data(), {kTokens, kHidden}),
                                                  view_of(topk_idx.data(), {kTokens, kTopk}), call);
    std::memcpy(recv_x_.data(), result.x.data, recv_x_.size());
    tokens_.assign(result.source_tokens.as<std::int32_t>(),
                   result.source_tokens.as<std::int32_t>() + kRows);
  }

  void expect_refused(const Lies& lies) {
    try {
      dispatch(lies);
      ADD_FAILURE() << "a list that cannot be";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
      EXPECT_EQ(error.peer(), kPeer);
    }
    // Rank 0's own row may be there.
    const auto is_of_the_peer = [](std::byte byte) {
      return byte >= std::byte{1} && byte <= std::byte{3};
    };
    EXPECT_TRUE(std::none_of(recv_x_.begin(), recv_x_.end(), is_of_the_peer));
    for (int half = 0; half < layout::kNumHalves; ++half) {
      const std::byte* const rows = block_.at(layout_.view_rows(half));
      EXPECT_TRUE(std::none_of(rows, rows + kRows * kPitch, is_of_the_peer));
    }
  }

  static constexpr int kRows = 6;  // the capacity
  static BufferOptions options() {
    return {.num_experts = 2,
            .max_tokens = kTokens,
            .max_hidden = kHidden,
            .max_topk = kTopk,
            .capacity_rows = kRows,
            .timeout = std::chrono::seconds(10)};
  }
  const layout::Block layout_ = runtime::make_plan(options(), 0, 2).block;
  test::GuardedBlock block_;
  std::vector<std::byte> recv_x_;
  std::vector<std::int32_t> tokens_;
  Sent sent_;
};

INSTANTIATE_TEST_SUITE_P(, Parcels, testing::Values(Placement::kPacked, Placement::kSlotted),
                         [](const auto& placement) { return std::string(name(placement.param)); });

TEST_P(Parcels, ARowLeavesOncePerPeerHoweverManyOfItsExpertsAreThere) {
  dispatch({.counts = {0, 0}, .list = {0, 0}}, {1, 1, -1, 0, 1, 0});
  ASSERT_EQ(sent_.size(), 3U);  // the list, and runs of tokens that follow each other
  EXPECT_EQ(sent_[0].count * sent_[0].pitch, layout::Parcel::list_bytes(2, kTopk, false));
  for (const std::size_t i : {1, 2}) {
    EXPECT_EQ(sent_[i].count, 1);
    EXPECT_EQ(sent_[i].pitch, kPitch);
  }
  EXPECT_EQ(sent_[2].rows - sent_[1].rows, 2 * kPitch);
  EXPECT_EQ(sent_[2].offset - sent_[1].offset, kPitch);
}

TEST_P(Parcels, TokensThatFollowEachOtherLeaveTogether) {
  dispatch({.counts = {0, 0}, .list = {0, 0}}, {-1, -1, 1, 0, 0, 1});
  ASSERT_EQ(sent_.size(), 2U);
  EXPECT_EQ(sent_[1].count, 2);
}

TEST_P(Parcels, RowsGoToThePlacesOfATruthfulOne) {
  ASSERT_NO_FATAL_FAILURE(dispatch({.counts = {2, 1}, .list = {2, 0, 0, -1, 0, 2, 0, 1}}));
  EXPECT_EQ(recv_x_[kPitch], std::byte{1});
  EXPECT_EQ(recv_x_[2 * kPitch], std::byte{2});
  tokens_.resize(3);
  EXPECT_EQ(tokens_, (std::vector<std::int32_t>{0, 0, 2}));
}

TEST_P(Parcels, RowsBeyondTheCountsAreRefused) {
  expect_refused({.counts = {1, 1}, .list = {2, 0, 0, -1, 0, 2, 0, 1}});
  expect_refused({.counts = {2, 0}, .list = {3, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0}});
}

TEST_P(Parcels, RowsThatAreMissingAreRefused) {
  expect_refused({.counts = {2, 1}, .list = {1, 0, 0, 1, 0}});
  expect_refused({.counts = {2, 1}, .list = {0, 0}});
}

TEST_P(Parcels, RowsTokensAndExpertsThatThereAreNotAreRefused) {
  expect_refused({.counts = {2, 1}, .list = {kTokens + 1, 0, 0, -1, 0, 2, 0, 1}});
  expect_refused({.counts = {2, 1}, .list = {-1, 0, 0, -1, 0, 2, 0, 1}});
  expect_refused({.counts = {2, 1}, .list = {2, 0, kTokens, -1, 0, 2, 0, 1}});
  expect_refused({.counts = {2, 1}, .list = {2, 0, 0, 2, 0, 2, 0, 1}});
}

}  // namespace
}  // namespace tandem::cpu
