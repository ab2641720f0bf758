// The CUDA backend's entry in registry.cc.
#pragma once

#include "runtime/backend.h"

namespace tandem::cuda {

const runtime::BackendInterface& backend();

}  // namespace tandem::cuda
