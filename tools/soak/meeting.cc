#include "soak/meeting.h"

#include <fmt/format.h>

#include <utility>

namespace tandem::tools {

namespace {

// Nobody else is on these hosts' network.
constexpr int kMeetingPort = 7000;
constexpr int kFirstDoorPort = 7001;

}  // namespace

Meeting::Meeting(const SoakOptions& options, std::string name)
    : num_ranks_(options.ranks), name_(std::move(name)) {
  if (options.launch == Launch::kHosts) hosts_.emplace(options.hosts);
}

int Meeting::host_of(int rank) const { return rank / (num_ranks_ / hosts_->size()); }

std::string Meeting::door_of(int rank) const {
  return fmt::format("{}:{}", NetworkHosts::address(host_of(rank)), kFirstDoorPort + rank);
}

BufferOptions Meeting::with_door(BufferOptions buffer, int rank) const {
  buffer.door = name_;
  if (hosts_) buffer.door_address = door_of(rank);
  return buffer;
}

Communicator Meeting::connect(int rank) const {
  if (!hosts_) return Communicator::connect(name_, rank, num_ranks_);
  hosts_->enter(host_of(rank));
  return Communicator::connect_across_hosts(
      fmt::format("{}:{}", NetworkHosts::address(0), kMeetingPort), name_, rank, num_ranks_);
}

Buffer Meeting::join(int rank, const BufferOptions& buffer) const {
  const BufferOptions options = with_door(buffer, rank);
  if (!hosts_) return Buffer::join(rank, options);
  hosts_->enter(host_of(rank));
  // Rank 0 is there from the beginning to the end.
  return Buffer::join_across_hosts(door_of(0), name_, rank, options);
}

}  // namespace tandem::tools
