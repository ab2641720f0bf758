// Which experts the tokens of a bench case select.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/cases.h"

namespace tandem::tools {

// Selections of many tokens, from a file.
struct RecordedRouting {
  int experts = 0;
  int topk = 0;
  std::vector<std::int64_t> topk_idx = {};  // [N, K]
};

// Tensors routing.0, routing.1, ... of a file like data/moe_layer.safetensors, one after the other;
// E is w1's first extent. Throws SafetensorsError.
RecordedRouting read_routing(const std::string& path);

// [R] of [T, K]. Of a recorded routing rank r takes the tokens from r * T on, from the start again
// at its end; its E and K must be the case's.
std::vector<std::vector<std::int64_t>> make_routing(const BenchCase& work,
                                                    const RecordedRouting& recorded,
                                                    std::uint64_t seed);

// Rows that each expert receives, [E].
std::vector<std::int64_t> rows_of_experts(const BenchCase& work,
                                          const std::vector<std::vector<std::int64_t>>& routing);

}  // namespace tandem::tools
