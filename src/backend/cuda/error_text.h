// From the record that a kernel left to the Error that the caller gets.
#pragma once

#include <string>

#include "backend/cuda/state_view.h"
#include "runtime/backend.h"

namespace tandem::cuda {

// After these the buffer takes no more operations.
bool is_fatal(const ErrorRecord& record);

// `why_lost`: of the record's peer, for kPeerLost.
[[noreturn]] void throw_error(const ErrorRecord& record, const runtime::BufferPlan& plan,
                              const std::string& why_lost);

}  // namespace tandem::cuda
