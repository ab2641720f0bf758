// Abstract Unix-domain sockets by a name of the user's choice: no files, gone with the process that
// listens, and only for processes of one user, for whom the kernel vouches on both sides.
#pragma once

#include <string>

#include "runtime/descriptor.h"
#include "runtime/socket_channel.h"

namespace tandem::runtime {

// Listens under `name`; empty if somebody does already. `what` is how errors call it. Throws
// kResource.
Descriptor try_listen(const std::string& name, const std::string& what);

// A connection to whoever listens under `name`; empty if nobody does at the moment. Throws
// kInvalidArgument if another user does, kResource.
Channel try_connect(const std::string& name, const std::string& what);

// A name that nobody can guess, of 128 random bits.
std::string random_rendezvous_name();

}  // namespace tandem::runtime
