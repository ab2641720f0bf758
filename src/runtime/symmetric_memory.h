// One block of host memory per rank, all of the same size, mapped by every rank of the same host.
//
// Between processes a block is a sealed memfd whose descriptor travels over the bootstrap's
// sockets: it never has a name, so nothing is left in /dev/shm whatever happens to the process, and
// nobody else can open it. Within one process ranks share pointers, so that race detectors see one
// address per byte. Peers' blocks stay mapped while this object lives, even after a peer has
// destroyed its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/bootstrap.h"

namespace tandem::runtime {

class SymmetricMemory {
 public:
  // Collective. Zero-filled. Throws kResource with the bytes asked and available.
  SymmetricMemory(Bootstrap& bootstrap, std::int64_t size_bytes);

  [[nodiscard]] std::int64_t size_bytes() const { return size_bytes_; }
  // Null for a rank on another host.
  [[nodiscard]] std::byte* block(int rank) const { return blocks_[rank].get(); }
  [[nodiscard]] const std::shared_ptr<std::byte>& shared_block(int rank) const {
    return blocks_[rank];
  }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(blocks_.size()); }

 private:
  std::int64_t size_bytes_ = 0;
  std::vector<std::shared_ptr<std::byte>> blocks_;  // by rank
};

}  // namespace tandem::runtime
