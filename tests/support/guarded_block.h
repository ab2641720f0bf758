// Ranks' blocks between pages that nobody may touch, each with a copy to compare it with: what may
// an operation have changed?
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/membership.h"
#include "support/fake_bootstrap.h"

namespace tandem::test {

class GuardedBlock {
 public:
  explicit GuardedBlock(std::int64_t size_bytes);

  // Shares the memory, for a bootstrap to hand out.
  [[nodiscard]] const std::shared_ptr<std::byte>& memory() const { return memory_; }
  [[nodiscard]] std::byte* at(std::int64_t offset) const { return memory_.get() + offset; }

  // Takes the copy.
  void remember();
  // From now on bytes [begin, end) may differ from the copy.
  void allow(std::int64_t begin, std::int64_t end);
  // Where the first other byte is that differs (rounded down to eight), if one does.
  [[nodiscard]] std::optional<std::int64_t> first_change() const;

 private:
  std::shared_ptr<std::byte> memory_;
  std::vector<std::byte> copy_;
  std::vector<bool> allowed_;  // by eight bytes: the unit that words, rows and regions keep to
};

// Gives a buffer memory of the test's in place of what it would share with its peers: the blocks,
// then the membership board.
class PlacedBootstrap final : public FakeBootstrap {
 public:
  PlacedBootstrap(int rank, const std::vector<GuardedBlock>& blocks, const GuardedBlock& board)
      : FakeBootstrap(rank, static_cast<int>(blocks.size())), next_(2) {
    for (const GuardedBlock& block : blocks) next_[0].push_back(block.memory());
    next_[1].assign(blocks.size(), board.memory());
  }
  // For a peer, which needs its board only.
  PlacedBootstrap(int rank, int size, const GuardedBlock& board)
      : FakeBootstrap(rank, size),
        next_{std::vector<std::shared_ptr<void>>(size, board.memory())} {}

  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void>) override {
    return next_[num_exchanges_++];
  }

 private:
  std::vector<std::vector<std::shared_ptr<void>>> next_;
  std::size_t num_exchanges_ = 0;
};

// The board that ranks of `size` share, and peers of `rank` on it, who take part.
struct PeersOnBoard {
  PeersOnBoard(int rank, int size, layout::Epoch first_epoch);

  GuardedBlock board;
  std::vector<std::unique_ptr<runtime::Membership>> members;  // by rank; null for `rank`
};

}  // namespace tandem::test
