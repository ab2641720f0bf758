// `tandem soak`: operations of every kind, mixed at random for minutes, each row checked; with
// --faults while ranks are lost and come back.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::tools {

// Adds the subcommand; when it was chosen, `run` does it and returns the exit code.
void add_soak(CLI::App& app, std::function<int()>& run);

}  // namespace tandem::tools
