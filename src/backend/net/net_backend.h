// The network's entry in the registry.
#pragma once

#include "runtime/network.h"

namespace tandem::net {

const runtime::NetworkInterface& network();

}  // namespace tandem::net
