// Options that commands have in common: An option that is given again replaces the one before.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "common/launch.h"
#include "tandem/types.h"

namespace CLI {
class App;
}

namespace tandem::tools {

void add_choice(CLI::App& app, const std::string& option, std::string& target,
                const std::vector<std::string>& words, const std::string& help);
void add_number(CLI::App& app, const std::string& option, int& target, int least, int most,
                const std::string& help);

// --backend, and what its words and those of --launch mean.
void add_backend(CLI::App& app, std::string& target, const std::string& help);
Backend backend_of(const std::string& word);
Launch launch_of(const std::string& word);

// --launch, and with hosts how many these are and what is on each.
struct HostsArguments {
  std::string launch = "threads";
  int hosts = 2;
  int ranks_per_host = 1;
};
void add_launch(CLI::App& app, HostsArguments& target);
// How many ranks that makes; `ranks` unless the hosts say it.
int num_ranks(const HostsArguments& arguments, int ranks);

// --timeout, in seconds, and the same for a buffer.
void add_timeout(CLI::App& app, double& target_s);
std::chrono::nanoseconds timeout_of(double seconds);

// --json FILE|-
void add_json(CLI::App& app, std::string& target);

}  // namespace tandem::tools
