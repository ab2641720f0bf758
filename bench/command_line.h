// The arguments that the CPU benchmark's programs share, and the line of JSON that each case gives.
#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness.h"
#include "workload.h"

namespace tandem::bench {

struct Arguments {
  std::vector<int> tokens{1, 8, 32, 128, 512};
  std::vector<int> hidden{7168};
  std::vector<std::string> formats{"bf16"};
  int topk = 8;
  int num_experts = 64;
  double seconds = 1.0;
  std::uint64_t seed = 1;
  std::string area;  // file that all ranks map as the harness's memory, where nobody maps it else
};

inline void add_options(CLI::App& app, Arguments& arguments) {
  app.add_option("--tokens", arguments.tokens, "Tokens on every rank")->delimiter(',');
  app.add_option("--hidden", arguments.hidden, "Channels of a token")->delimiter(',');
  app.add_option("--format", arguments.formats, "Formats of the dispatch")
      ->delimiter(',')
      ->check(CLI::IsMember({"bf16", "fp8"}));
  app.add_option("--topk", arguments.topk, "Experts that a token selects");
  app.add_option("--experts", arguments.num_experts, "Experts over all ranks");
  app.add_option("--seconds", arguments.seconds, "Time to measure each case for");
  app.add_option("--seed", arguments.seed, "Seed of tokens, routing and weights");
  app.add_option("--area", arguments.area,
                 "File of zeros for the ranks' barriers and samples, for ranks that others start");
}

// Every combination of the lists, for `num_ranks`.
inline std::vector<Case> cases(const Arguments& arguments, int num_ranks) {
  if (num_ranks > SharedArea::kMaxRanks || arguments.num_experts % num_ranks != 0) {
    throw std::invalid_argument("the benchmark wants at most " +
                                std::to_string(SharedArea::kMaxRanks) +
                                " ranks and a multiple of as many experts");
  }
  std::vector<Case> result;
  for (const int hidden : arguments.hidden) {
    for (const std::string& format : arguments.formats) {
      for (const int num_tokens : arguments.tokens) {
        result.push_back({.num_ranks = num_ranks,
                          .num_experts = arguments.num_experts,
                          .num_tokens = num_tokens,
                          .hidden = hidden,
                          .topk = arguments.topk,
                          .format = format == "fp8" ? Format::kFp8 : Format::kBFloat16,
                          .seed = arguments.seed});
      }
    }
  }
  return result;
}

inline void print_result(const Case& work, const Timings& timings) {
  const auto both = [](const Statistics& statistics) {
    return nlohmann::ordered_json{{"median", statistics.median_us}, {"p99", statistics.p99_us}};
  };
  std::cout << nlohmann::ordered_json{{"ranks", work.num_ranks},
                                      {"tokens", work.num_tokens},
                                      {"hidden", work.hidden},
                                      {"topk", work.topk},
                                      {"experts", work.num_experts},
                                      {"format", is_fp8(work.format) ? "fp8" : "bf16"},
                                      {"bytes", work.dispatch_bytes()},
                                      {"iterations", timings.iterations},
                                      {"dispatch_us", both(timings.dispatch)},
                                      {"combine_us", both(timings.combine)},
                                      {"pair_us", timings.pair_us}}
            << std::endl;
}

}  // namespace tandem::bench
