// Where the ranks of a session that are processes of their own find each other, and where another
// process joins them in the place of one that has ended: on this host by name, on several by
// address.
#pragma once

#include <optional>
#include <string>

#include "common/network_hosts.h"
#include "soak/options.h"
#include "tandem/buffer.h"

namespace tandem::tools {

class Meeting {
 public:
  // Makes the hosts, if there are any; they are gone with it.
  Meeting(const SoakOptions& options, std::string name);

  // The options of `rank`'s buffer: `buffer`, and where it can be joined.
  [[nodiscard]] BufferOptions with_door(BufferOptions buffer, int rank) const;

  // By the process that is `rank`: goes to its host first.
  [[nodiscard]] Communicator connect(int rank) const;
  [[nodiscard]] Buffer join(int rank, const BufferOptions& buffer) const;

 private:
  [[nodiscard]] int host_of(int rank) const;
  [[nodiscard]] std::string door_of(int rank) const;

  int num_ranks_;
  std::string name_;
  std::optional<NetworkHosts> hosts_;
};

}  // namespace tandem::tools
