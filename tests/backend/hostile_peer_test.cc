// One rank whose peers write what they like into its control words: operations fail, and write
// nowhere else than they may. What `./dev fuzz control` has found, word for word.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "runtime/buffer_state.h"
#include "support/guarded_block.h"
#include "tandem/buffer.h"

namespace tandem::cpu {
namespace {

using layout::Word;

std::atomic_ref<Word> word_at(const test::GuardedBlock& block, std::int64_t offset) {
  return std::atomic_ref<Word>(*reinterpret_cast<Word*>(block.at(offset)));
}

// Rank 1 of two has four rows for its own only expert. Rank 0 says that it has as many as go into
// the view, and, in rank 1's memory, that rank 1 has none: rank 1's rows would begin where the view
// ends.
TEST(HostilePeer, OwnCountsAreNotTakenFromMemoryThatPeersWrite) {
  constexpr int kRank = 1;
  constexpr int kTokens = 4;
  constexpr int kHidden = 8;
  const BufferOptions options{.num_experts = 2,
                              .max_tokens = kTokens,
                              .max_hidden = kHidden,
                              .max_topk = 1,
                              .slotted_placement = false,
                              .padded_layout = false,
                              .capacity_rows = kTokens,
                              .timeout = std::chrono::seconds(10)};
  const layout::Block layout = runtime::make_plan(options, kRank, 2).block;
  std::vector<test::GuardedBlock> blocks;
  for (int rank = 0; rank < 2; ++rank) blocks.emplace_back(layout.size_bytes());
  constexpr layout::Epoch kEpoch = 1;
  const test::PeersOnBoard peers(kRank, 2, kEpoch);
  Buffer buffer(Communicator(std::make_shared<test::PlacedBootstrap>(kRank, blocks, peers.board)),
                options);
  for (test::GuardedBlock& block : blocks) block.remember();

  constexpr int kParity = layout::parity(kEpoch);
  std::thread peer([&] {
    const test::GuardedBlock& victim = blocks[kRank];
    const test::GuardedBlock& own = blocks[0];
    for (const test::GuardedBlock& block : blocks) {
      while (layout::epoch_of(word_at(block, layout.header(kParity, kRank)).load()) != kEpoch) {
        std::this_thread::yield();
      }
    }
    for (int which = 0; which < layout::kNumArguments; ++which) {
      const auto argument = static_cast<layout::Argument>(which);
      word_at(victim, layout.argument(kParity, 0, argument)) =
          word_at(own, layout.argument(kParity, kRank, argument)).load();
    }
    word_at(victim, layout.count(kParity, 0, 0)) = layout::make_word(kEpoch, 0);
    word_at(victim, layout.count(kParity, 0, 1)) = layout::make_word(kEpoch, kTokens);
    word_at(victim, layout.count(kParity, kRank, 1)) = layout::make_word(kEpoch, 0);
    word_at(victim, layout.arrived(kParity, 0, 0)) = layout::make_word(kEpoch, 0);
    word_at(victim, layout.header(kParity, 0)) = word_at(own, layout.header(kParity, kRank)).load();
  });
  const std::vector<bfloat16> x(kTokens * kHidden, bfloat16{0x3f80});
  const std::vector<std::int32_t> topk_idx(kTokens, 1);
  try {
    static_cast<void>(buffer.dispatch(view_of(x.data(), {kTokens, kHidden}),
                                      view_of(topk_idx.data(), {kTokens, 1}),
                                      {.layout = Layout::kPacked}));
    ADD_FAILURE() << "eight rows fit where there is room for four";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCapacity) << error.what();
  }
  peer.join();
  for (test::GuardedBlock& block : blocks) {
    block.allow(0, layout.control_bytes());
    EXPECT_FALSE(block.first_change()) << "at " << *block.first_change();
  }
}

}  // namespace
}  // namespace tandem::cpu
