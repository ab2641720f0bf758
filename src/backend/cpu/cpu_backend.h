// The CPU backend's entry in the registry.
#pragma once

#include "runtime/backend.h"

namespace tandem::cpu {

const runtime::BackendInterface& backend();

}  // namespace tandem::cpu
