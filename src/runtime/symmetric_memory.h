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
#include "runtime/descriptor.h"

namespace tandem::runtime {

class SymmetricMemory {
 public:
  // Is a block a file also where all ranks are threads of one process?
  enum class Kind { kPlain, kAlwaysFile };

  // Collective. Zero-filled. Throws kResource with the bytes asked and available.
  SymmetricMemory(Bootstrap& bootstrap, std::int64_t size_bytes, Kind kind = Kind::kPlain);

  // Not collective: the block of a rank that joins others, whose blocks follow by set_block.
  SymmetricMemory(int rank, int num_ranks, std::int64_t size_bytes);

  [[nodiscard]] std::int64_t size_bytes() const { return size_bytes_; }
  // Null for a rank on another host.
  [[nodiscard]] std::byte* block(int rank) const { return blocks_[rank].get(); }
  [[nodiscard]] const std::shared_ptr<std::byte>& shared_block(int rank) const {
    return blocks_[rank];
  }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(blocks_.size()); }

  // The own block's file, for others to map; empty if it is none.
  [[nodiscard]] const Descriptor& file() const { return file_; }

  // Room for more ranks, whose blocks are null until set_block maps them, in place of an earlier
  // one if there is one. Throws kMismatch if `file` is no block of this size, kResource.
  void make_room(int num_ranks);
  void set_block(int rank, const Descriptor& file);
  // From now on the rank is one of another host.
  void drop_block(int rank) { blocks_[rank].reset(); }

 private:
  int rank_ = 0;
  std::int64_t size_bytes_ = 0;
  std::vector<std::shared_ptr<std::byte>> blocks_;  // by rank
  Descriptor file_;
};

}  // namespace tandem::runtime
