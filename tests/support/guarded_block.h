// Ranks' blocks between pages that nobody may touch, each with a copy to compare it with: what may
// an operation have changed?
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

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

// Gives a buffer these blocks in place of those that it would share with its peers.
class BlocksBootstrap final : public FakeBootstrap {
 public:
  BlocksBootstrap(int rank, const std::vector<GuardedBlock>& blocks)
      : FakeBootstrap(rank, static_cast<int>(blocks.size())), blocks_(&blocks) {}

  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void>) override {
    std::vector<std::shared_ptr<void>> objects;
    for (const GuardedBlock& block : *blocks_) objects.push_back(block.memory());
    return objects;
  }

 private:
  const std::vector<GuardedBlock>* blocks_;
};

}  // namespace tandem::test
