#include "common/options.h"

#include <CLI/CLI.hpp>
#include <cstdint>

namespace tandem::tools {

void add_choice(CLI::App& app, const std::string& option, std::string& target,
                const std::vector<std::string>& words, const std::string& help) {
  app.add_option(option, target, help)
      ->check(CLI::IsMember(words))
      ->capture_default_str()
      ->take_last();
}

void add_number(CLI::App& app, const std::string& option, int& target, int least, int most,
                const std::string& help) {
  app.add_option(option, target, help)
      ->check(CLI::Range(least, most))
      ->capture_default_str()
      ->take_last();
}

void add_backend(CLI::App& app, std::string& target, const std::string& help) {
  add_choice(app, "--backend", target, {"cpu", "cuda"}, help);
}

Backend backend_of(const std::string& word) {
  return word == "cuda" ? Backend::kCuda : Backend::kCpu;
}

void add_launch(CLI::App& app, HostsArguments& target) {
  add_choice(app, "--launch", target.launch, {"threads", "processes", "apart", "hosts"},
             "what a rank is; hosts: a process on one of several\nnetwork namespaces (as root)");
  add_number(app, "--hosts", target.hosts, 1, 64, "number of hosts (--launch hosts)");
  add_number(app, "--ranks-per-host", target.ranks_per_host, 1, kMaxRanks,
             "and of ranks on each, in place of --ranks");
}

int num_ranks(const HostsArguments& arguments, int ranks) {
  return arguments.launch == "hosts" ? arguments.hosts * arguments.ranks_per_host : ranks;
}

Launch launch_of(const std::string& word) {
  if (word == "hosts") return Launch::kHosts;
  if (word == "apart") return Launch::kApart;
  return word == "processes" ? Launch::kProcesses : Launch::kThreads;
}

void add_timeout(CLI::App& app, double& target_s) {
  app.add_option("--timeout", target_s, "the longest any wait may take, in seconds")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str()
      ->take_last();
}

std::chrono::nanoseconds timeout_of(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));  // at most 1e18: fits
}

void add_json(CLI::App& app, std::string& target) {
  app.add_option("--json", target, "write results there; -: standard output")
      ->type_name("FILE|-")
      ->take_last();
}

}  // namespace tandem::tools
