// `tandem info`: what this build can do on this machine.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::tools {

// Adds the subcommand to `app`; see add_test_low_latency.
void add_info(CLI::App& app, std::function<int()>& run);

}  // namespace tandem::tools
