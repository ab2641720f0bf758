// What `tandem bench` is asked to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/cases.h"
#include "common/launch.h"
#include "tandem/types.h"

namespace CLI {
class App;
}

namespace tandem::tools {

struct BenchArguments {
  std::string backend = "cuda";
  std::string launch = "threads";
  std::vector<int> ranks;  // lists: empty where the option was not given
  std::vector<int> tokens;
  std::vector<std::string> formats;
  std::vector<std::string> placements;
  std::vector<std::string> stagings;
  std::vector<std::string> routings;
  int hidden = 7168;
  int topk = 8;
  int experts = 64;
  int sms = 0;
  std::string layout = "automatic";
  std::string data = "data/moe_layer.safetensors";
  int operations = 0;
  int replays = 0;
  double budget_s = 270;
  double timeout_s = 10;
  std::uint64_t seed = 1;
  std::string json;
};

void add_options(CLI::App& app, BenchArguments& arguments);

struct BenchOptions {
  Backend backend = Backend::kCuda;
  Launch launch = Launch::kThreads;
  std::vector<BenchCase> cases;  // sms_per_rank as asked for: 0 where a share is
  std::string data;
  int operations = 0;  // per recording; 0: chosen by the case
  int replays = 0;     // likewise
  std::chrono::duration<double> budget{0};
  std::chrono::nanoseconds timeout = std::chrono::seconds(10);
  std::uint64_t seed = 1;
};

// The cases: those of the lists given, each combined with each; if no list is given, the backend's
// standard set. Throws UsageError for what cannot be.
BenchOptions resolve(const BenchArguments& arguments);

}  // namespace tandem::tools
