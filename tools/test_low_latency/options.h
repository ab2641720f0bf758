// What `tandem test-low-latency` is asked to do: its command line, and the same as values.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/options.h"
#include "tandem/types.h"

namespace tandem::tools {

// As typed. "all" and "both" stand for every value.
struct TestArguments {
  std::string backend = "cpu";
  HostsArguments where;
  int ranks = 8;
  int tokens = 128;
  int hidden = 7168;
  int topk = 8;
  int experts = 288;
  std::string format = "bf16";
  std::string placement = "all";
  std::string layout = "all";
  std::string zero_copy = "both";
  std::string hook = "both";
  bool uneven = false;
  bool partial_sums = false;
  int masked = -1;  // -1: 10, or a quarter of the selections if those are fewer
  int iterations = -1;
  double timeout_s = 30;
  std::uint64_t seed = 1;
  int pressure = 0;
  std::string json;
};

void add_options(CLI::App& app, TestArguments& arguments);

// One way to run dispatch and combine.
struct Combination {
  Format format = Format::kBFloat16;
  Placement placement = Placement::kPacked;
  Layout layout = Layout::kPadded;
  bool zero_copy = false;
  bool hook = false;
};

// "bf16 packed padded zero-copy hook"; what is off is left out.
std::string describe(const Combination& combination);

// The problem that every combination is run on.
struct Shape {
  int ranks = 8;
  int tokens = 128;  // of one rank; with `uneven` of the rank that has most
  int hidden = 7168;
  int topk = 8;
  int experts = 288;
  bool uneven = false;
  bool partial_sums = false;  // weights go with tokens
  int masked = 10;
  std::uint64_t map_seed = 1;  // of uneven experts' owners: all seeds of a run share a buffer
};

struct TestOptions {
  Backend backend = Backend::kCpu;
  Launch launch = Launch::kThreads;
  int hosts = 1;  // with Launch::kHosts
  Shape shape;
  std::vector<Combination> combinations;  // in an order that lets neighbours share a buffer
  std::optional<int> iterations;          // none: as many as fit in a moment
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::uint64_t seed = 1;
  int pressure = 0;
};

// Throws UsageError where the arguments contradict each other.
TestOptions resolve(const TestArguments& arguments);

}  // namespace tandem::tools
