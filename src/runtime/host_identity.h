// Which host, or container, this process is on: can it meet another over an abstract socket?
#pragma once

#include <string>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::runtime {

// The kernel's boot and the network namespace: hosts of one name differ, and so do containers that
// do not share the host's network.
std::string host_identity();

// What a rank says of itself when ranks meet through a gathering function.
struct Introduction {
  std::string identity;  // of its host
  std::string name;      // of 128 random bits, for the ranks of a host to meet under
};

// Collective through the caller's gathering function, called once: every rank's introduction. A
// rank that shares no memory (CommunicatorOptions) says that it is on a host of its own.
// Throws kInvalidArgument where rank, size or what was gathered makes no sense.
std::vector<Introduction> introduce(int rank, int size, const Communicator::AllGather& all_gather,
                                    bool shares_memory);

// The ranks on the host of `rank`, ascending.
std::vector<int> ranks_on_host_of(int rank, const std::vector<Introduction>& introductions);

}  // namespace tandem::runtime
