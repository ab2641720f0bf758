// `tandem run-layer`: a trained mixture-of-experts layer, expert-parallel, against its known
// result.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::tools {

// Adds the subcommand to `app`; see add_test_low_latency.
void add_run_layer(CLI::App& app, std::function<int()>& run);

}  // namespace tandem::tools
