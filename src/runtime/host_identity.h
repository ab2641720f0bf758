// Which host, or container, this process is on: can it meet another over an abstract socket?
#pragma once

#include <string>

#include "tandem/communicator.h"

namespace tandem::runtime {

// The kernel's boot and the network namespace: hosts of one name differ, and so do containers that
// do not share the host's network.
std::string host_identity();

// Collective through the caller's gathering function, called once: agrees on a rendezvous name that
// rank 0 chooses. Throws kUnreachable naming all ranks that are not on rank 0's host, and
// kInvalidArgument where rank, size or what was gathered makes no sense.
std::string meet_on_one_host(int rank, int size, const Communicator::AllGather& all_gather);

}  // namespace tandem::runtime
