#include "support/guarded_block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace tandem::test {
namespace {

constexpr std::int64_t kGuardBytes = std::int64_t{1} << 20;  // on either side
constexpr std::int64_t kUnit = 8;

}  // namespace

GuardedBlock::GuardedBlock(std::int64_t size_bytes)
    : copy_(size_bytes), allowed_(size_bytes / kUnit) {
  const std::size_t total = size_bytes + 2 * kGuardBytes;
  void* const space =
      ::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  auto* const block = static_cast<std::byte*>(space) + kGuardBytes;
  memory_ = {block, [space, total](std::byte*) { ::munmap(space, total); }};
  if (::mprotect(block, size_bytes, PROT_READ | PROT_WRITE) != 0) {
    throw std::system_error(errno, std::generic_category(), "mprotect");
  }
}

void GuardedBlock::remember() {
  std::memcpy(copy_.data(), memory_.get(), copy_.size());
  std::fill(allowed_.begin(), allowed_.end(), false);
}

void GuardedBlock::allow(std::int64_t begin, std::int64_t end) {
  std::fill(allowed_.begin() + begin / kUnit, allowed_.begin() + (end + kUnit - 1) / kUnit, true);
}

std::optional<std::int64_t> GuardedBlock::first_change() const {
  if (std::memcmp(copy_.data(), memory_.get(), copy_.size()) == 0) return std::nullopt;
  for (std::size_t unit = 0; unit < allowed_.size(); ++unit) {
    const auto offset = static_cast<std::int64_t>(unit) * kUnit;
    if (!allowed_[unit] && std::memcmp(copy_.data() + offset, at(offset), kUnit) != 0) {
      return offset;
    }
  }
  return std::nullopt;
}

PeersOnBoard::PeersOnBoard(int rank, int size, layout::Epoch first_epoch)
    : board(layout::Board(size).size_bytes()), members(size) {
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;  // its buffer makes its own
    PlacedBootstrap bootstrap(peer, size, board);
    members[peer] = std::make_unique<runtime::Membership>(bootstrap, size, first_epoch);
  }
}

}  // namespace tandem::test
