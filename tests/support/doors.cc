#include "support/doors.h"

#include <unistd.h>

#include "backend/net/unused_port.h"
#include "support/hosts.h"

namespace tandem::test {
Doors::Doors(const std::string& what, int max_ranks) {
  static int number = 0;
  name_ = what + '_' + std::to_string(::getpid()) + '_' + std::to_string(number++);
  if (ranks_share_memory()) return;
  rendezvous_ = host_address(0) + ':' + std::to_string(unused_port());
  while (static_cast<int>(ports_.size()) < max_ranks) ports_.push_back(unused_port());
}

Communicator Doors::connect(const Rank& everyone, int size) const {
  const int rank = everyone.index();
  if (ranks_share_memory()) return Communicator::connect(name_, rank, size);
  return Communicator::connect_across_hosts(rendezvous_, kSecret, rank, size,
                                            {.share_memory = hosts_share_memory()});
}

BufferOptions Doors::open(BufferOptions options, const Rank& everyone, int rank) const {
  options.door = name_;
  if (!ranks_share_memory()) {
    options.door_address =
        host_address(host_of(everyone.index())) + ':' + std::to_string(ports_.at(rank));
  }
  return options;
}

Buffer Doors::join(int rank, const BufferOptions& options, int host) const {
  if (ranks_share_memory()) return Buffer::join(rank, options);
  return Buffer::join_across_hosts(host_address(host_of(host)) + ':' + std::to_string(ports_[host]),
                                   kSecret, rank, options);
}

Buffer Doors::join_with_secret(const std::string& secret, int rank,
                               const BufferOptions& options) const {
  return Buffer::join_across_hosts(host_address(0) + ':' + std::to_string(ports_[0]), secret, rank,
                                   options);
}

}  // namespace tandem::test
