// How ranks that know only an address find each other: rank 0 listens there, with UCX's own
// listener, the others connect to it, and messages are gathered through rank 0 until all are
// connected otherwise (net_bootstrap.h). Whoever does not know the secret is told so and forgotten.
#pragma once

#include <chrono>
#include <string>

#include "tandem/communicator.h"

namespace tandem::net {

struct MeetingPlace {
  std::string address;  // "host:port", "[v6]:port"
  std::string secret;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
};

// A gathering function that may be called any number of times; the connections close with it.
// Waits until this host knows a way to the address. Throws kInvalidArgument for one that makes no
// sense, kTimeout if there is no way in time, kResource if rank 0 cannot listen there. The function
// throws kTimeout naming the ranks that did not come, kPeerLost for one that left, kInvalidArgument
// where ranks contradict each other or the secret is another.
Communicator::AllGather meet(const MeetingPlace& place);

}  // namespace tandem::net
