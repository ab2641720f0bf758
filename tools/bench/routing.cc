#include "bench/routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/hash.h"
#include "run_layer/safetensors.h"

namespace tandem::tools {

RecordedRouting read_routing(const std::string& path) {
  const Safetensors file = Safetensors::read(path);
  const SafetensorsTensor& weights = file.at("w1");
  if (weights.shape.size() != 3) throw SafetensorsError("w1 has not three dimensions");
  RecordedRouting recorded{.experts = static_cast<int>(weights.shape[0])};
  for (int part = 0; file.tensors().contains(fmt::format("routing.{}", part)); ++part) {
    const std::string tensor_name = fmt::format("routing.{}", part);
    const SafetensorsTensor& tensor = file.at(tensor_name);
    if (tensor.dtype != "I16" || tensor.shape.size() != 2) {
      throw SafetensorsError(fmt::format("{} is not a matrix of I16", tensor_name));
    }
    if (part == 0) recorded.topk = static_cast<int>(tensor.shape[1]);
    if (tensor.shape[1] != recorded.topk) {
      throw SafetensorsError(fmt::format("{} has another top-k than routing.0", tensor_name));
    }
    for (const std::int16_t expert : elements_of<std::int16_t>(tensor)) {
      if (expert >= recorded.experts) {
        throw SafetensorsError(
            fmt::format("{} selects expert {} of {}", tensor_name, expert, recorded.experts));
      }
      recorded.topk_idx.push_back(expert);
    }
  }
  if (recorded.topk_idx.empty()) throw SafetensorsError("no tensor routing.0 with selections");
  return recorded;
}

std::vector<std::vector<std::int64_t>> make_routing(const BenchCase& work,
                                                    const RecordedRouting& recorded,
                                                    std::uint64_t seed) {
  const auto entries = static_cast<std::size_t>(work.tokens) * static_cast<std::size_t>(work.topk);
  std::vector<std::vector<std::int64_t>> routing(static_cast<std::size_t>(work.ranks));
  std::vector<std::int64_t> experts(static_cast<std::size_t>(work.experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::uint64_t state = mix(seed);
  for (std::size_t rank = 0; rank < routing.size(); ++rank) {
    routing[rank].reserve(entries);
    if (work.routing == BenchRouting::kReal) {
      for (std::size_t entry = 0; entry < entries; ++entry) {
        routing[rank].push_back(
            recorded.topk_idx[(rank * entries + entry) % recorded.topk_idx.size()]);
      }
      continue;
    }
    for (int token = 0; token < work.tokens; ++token) {
      // The first K of a shuffle; with a hot expert, expert 0 is brought to the front first.
      std::size_t chosen = 0;
      if (work.routing == BenchRouting::kHot) {
        std::swap(experts[0], *std::find(experts.begin(), experts.end(), 0));
        chosen = 1;
      }
      for (; chosen < static_cast<std::size_t>(work.topk); ++chosen) {
        state = mix(state + 0x9e3779b97f4a7c15U);
        std::swap(experts[chosen], experts[chosen + state % (experts.size() - chosen)]);
      }
      routing[rank].insert(routing[rank].end(), experts.begin(), experts.begin() + work.topk);
    }
  }
  return routing;
}

std::vector<std::int64_t> rows_of_experts(const BenchCase& work,
                                          const std::vector<std::vector<std::int64_t>>& routing) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(work.experts));
  for (const std::vector<std::int64_t>& selections : routing) {
    for (const std::int64_t expert : selections) {
      if (expert >= 0) ++rows[static_cast<std::size_t>(expert)];
    }
  }
  return rows;
}

}  // namespace tandem::tools
