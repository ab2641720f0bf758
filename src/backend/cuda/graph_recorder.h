// Recordings of GPU ranks: captured graphs, timed by events on the rank's stream.
#pragma once

#include <memory>

#include "runtime/recorder.h"

namespace tandem::cuda {

std::unique_ptr<runtime::Recorder> make_graph_recorder(int device);

}  // namespace tandem::cuda
