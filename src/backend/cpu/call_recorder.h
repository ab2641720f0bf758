// Recordings of CPU ranks: calls, made again for every run and timed by the host's clock.
#pragma once

#include <memory>

#include "runtime/recorder.h"

namespace tandem::cpu {

std::unique_ptr<runtime::Recorder> make_call_recorder();

}  // namespace tandem::cpu
