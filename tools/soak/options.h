// What `tandem soak` is asked to do: its command line, and the same as values.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "common/options.h"
#include "tandem/types.h"

namespace tandem::tools {

// As typed.
struct SoakArguments {
  std::string backend = "cpu";
  HostsArguments where;
  double minutes = 1;
  bool faults = false;
  int ranks = 4;
  double timeout_s = 0;  // 0: 30, or 1 with faults
  std::uint64_t seed = 0;
  std::string json;
};

void add_options(CLI::App& app, SoakArguments& arguments);

struct SoakOptions {
  Backend backend = Backend::kCpu;
  Launch launch = Launch::kThreads;
  int hosts = 1;  // with Launch::kHosts
  std::chrono::nanoseconds duration{};
  bool faults = false;
  int ranks = 4;
  std::chrono::nanoseconds timeout{};
  std::uint64_t seed = 0;

  bool network_bears_turnover = false;

  // Whether ranks end and others join in their place. On GPUs of one host processes do; ranks that
  // are apart are only late.
  [[nodiscard]] bool ends_ranks() const {
    if (!faults || launch == Launch::kProcesses) return faults;
    return backend == Backend::kCpu &&
           (launch == Launch::kThreads || (launch == Launch::kHosts && network_bears_turnover));
  }
};

// Throws UsageError where the arguments contradict each other.
SoakOptions resolve(const SoakArguments& arguments);

}  // namespace tandem::tools
