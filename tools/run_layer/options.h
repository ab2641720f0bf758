// What `tandem run-layer` is asked to do.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "common/options.h"
#include "tandem/types.h"

namespace tandem::tools {

struct LayerArguments {
  std::string file;
  std::string backend = "cpu";
  int ranks = 8;
  HostsArguments where;
  std::string placement = "packed";
  std::string layout = "packed";
  std::string zero_copy = "on";
  std::vector<std::string> routings;  // besides topk_idx; "all": every one of the file
  int iterations = 5;
  double timeout_s = 30;
  std::string json;
};

void add_options(CLI::App& app, LayerArguments& arguments);

struct LayerOptions {
  Backend backend = Backend::kCpu;
  int ranks = 8;
  Launch launch = Launch::kThreads;
  int hosts = 1;  // with Launch::kHosts
  Placement placement = Placement::kPacked;
  Layout layout = Layout::kPacked;
  bool zero_copy = true;
  int iterations = 5;
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
};

LayerOptions resolve(const LayerArguments& arguments);

}  // namespace tandem::tools
