// `tandem test-low-latency`: is every way to run dispatch and combine right, and how fast is it?
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::tools {

// Adds the subcommand to `app`; when it is the one given, `run` becomes what does it and returns
// the exit code.
void add_test_low_latency(CLI::App& app, std::function<int()>& run);

}  // namespace tandem::tools
