// A buffer that processes join later, in the way that the launch under test asks for: on one host
// by its door's name, across hosts by the addresses at which its ranks listen.
#pragma once

#include <string>
#include <vector>

#include "support/world.h"

namespace tandem::test {

class Doors {
 public:
  // Made before ranks start, which may be that many.
  Doors(const std::string& what, int max_ranks);

  [[nodiscard]] const std::string& name() const { return name_; }

  // The first `size` ranks of the world, of whom `everyone` is one.
  [[nodiscard]] Communicator connect(const Rank& everyone, int size) const;
  // Opens the door of `rank`, which `everyone` is or is to be.
  [[nodiscard]] BufferOptions open(BufferOptions options, const Rank& everyone, int rank) const;
  // Joins through the door of rank 0 or, across hosts, of `host`.
  [[nodiscard]] Buffer join(int rank, const BufferOptions& options, int host = 0) const;
  // The same with another secret, which only counts across hosts.
  [[nodiscard]] Buffer join_with_secret(const std::string& secret, int rank,
                                        const BufferOptions& options) const;

 private:
  std::string name_;
  std::string rendezvous_;
  std::vector<int> ports_;  // by rank
};

}  // namespace tandem::test
