#include "test_low_latency/problem.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "common/hash.h"
#include "tandem/numeric.h"

namespace tandem::tools {

namespace {

// A stream of random numbers that is named by what it is for. The standard library's distributions
// differ between implementations; these do not.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t purpose, std::uint64_t rank = 0)
      : state_(mix(mix(mix(seed + 1) + purpose) + rank)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15U); }

  // In [0, bound), bound > 0. The bias of a bound far below 2^64 does not matter here.
  int below(int bound) { return static_cast<int>(next() % static_cast<std::uint64_t>(bound)); }

  // In [0, 1), with 24 bits.
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24F; }

 private:
  std::uint64_t state_;
};

enum Purpose : std::uint64_t { kTokenCounts, kOwners, kSelections, kMask, kWeights, kValues };

template <typename T>
T rounded(float value);
template <>
float rounded<float>(float value) {
  return value;
}
template <>
bfloat16 rounded<bfloat16>(float value) {
  return to_bfloat16(value);
}
template <>
float16 rounded<float16>(float value) {
  return to_float16(value);
}

// Values in (-1, 1) times a power of two from 1/8 to 8 of each token: fp8 scales differ from token
// to token, products with weights and experts' factors stay within fp16.
template <typename T>
std::vector<std::byte> random_values(int num_tokens, int hidden, std::uint64_t seed, int rank) {
  Random random(seed, kValues, static_cast<std::uint64_t>(rank));
  std::vector<T> values(static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(hidden));
  std::size_t position = 0;
  for (int token = 0; token < num_tokens; ++token) {
    const float magnitude = static_cast<float>(1 << random.below(7)) * 0x1p-3F;
    for (int channel = 0; channel < hidden; ++channel) {
      values[position++] = rounded<T>((2 * random.unit() - 1) * magnitude);
    }
  }
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<std::byte> random_tokens(DType dtype, int num_tokens, int hidden, std::uint64_t seed,
                                     int rank) {
  switch (dtype) {
    case DType::kFloat16:
      return random_values<float16>(num_tokens, hidden, seed, rank);
    case DType::kFloat32:
      return random_values<float>(num_tokens, hidden, seed, rank);
    default:
      return random_values<bfloat16>(num_tokens, hidden, seed, rank);
  }
}

}  // namespace

DType token_dtype(Format format) { return is_fp8(format) ? DType::kBFloat16 : value_dtype(format); }

std::vector<int> token_counts(const Shape& shape, std::uint64_t seed) {
  std::vector<int> counts(static_cast<std::size_t>(shape.ranks), shape.tokens);
  if (!shape.uneven || shape.ranks == 1) return counts;
  Random random(seed, kTokenCounts);
  for (int& count : counts) count = random.below(shape.tokens + 1);
  const int empty = random.below(shape.ranks);
  counts[static_cast<std::size_t>(empty)] = 0;
  counts[static_cast<std::size_t>((empty + 1) % shape.ranks)] = shape.tokens;
  return counts;
}

std::vector<int> expert_owners(const Shape& shape) {
  if (!shape.uneven) return {};
  Random random(shape.map_seed, kOwners);
  const int owning = shape.ranks >= 3 ? shape.ranks - 1 : shape.ranks;
  std::vector<int> owners(static_cast<std::size_t>(shape.experts));
  // The larger of two draws: later ranks own more, none more than about twice the mean.
  for (int& owner : owners) owner = std::max(random.below(owning), random.below(owning));
  return owners;
}

std::vector<std::int64_t> random_selections(const Shape& shape, int num_tokens, std::uint64_t seed,
                                            int rank) {
  Random random(seed, kSelections, static_cast<std::uint64_t>(rank));
  const auto topk = static_cast<std::size_t>(shape.topk);
  std::vector<std::int64_t> selections(static_cast<std::size_t>(num_tokens) * topk, -1);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  const int chosen = std::min(shape.topk, shape.experts);
  for (std::size_t token = 0; token < static_cast<std::size_t>(num_tokens); ++token) {
    for (int k = 0; k < chosen; ++k) {  // the first steps of a Fisher-Yates shuffle
      const auto from = static_cast<std::size_t>(k + random.below(shape.experts - k));
      std::swap(experts[static_cast<std::size_t>(k)], experts[from]);
      selections[token * topk + static_cast<std::size_t>(k)] = experts[static_cast<std::size_t>(k)];
    }
  }

  Random mask(seed, kMask, static_cast<std::uint64_t>(rank));
  std::vector<std::size_t> valid;
  for (std::size_t i = 0; i < selections.size(); ++i) {
    if (selections[i] >= 0) valid.push_back(i);
  }
  const std::size_t masked = std::min(valid.size(), static_cast<std::size_t>(shape.masked));
  for (std::size_t i = 0; i < masked; ++i) {
    std::swap(valid[i],
              valid[i + static_cast<std::size_t>(mask.below(static_cast<int>(valid.size() - i)))]);
    selections[valid[i]] = -1;
  }
  return selections;
}

reference::Problem make_problem(const Shape& shape, std::uint64_t seed, Format format) {
  reference::Problem problem;
  problem.num_ranks = shape.ranks;
  problem.num_experts = shape.experts;
  problem.hidden = shape.hidden;
  problem.topk = shape.topk;
  problem.max_tokens = std::max(shape.tokens, 1);
  problem.expert_owners = expert_owners(shape);
  problem.x_dtype = token_dtype(format);
  problem.format = format;
  problem.partial_sums = shape.partial_sums;
  const std::vector<int> counts = token_counts(shape, seed);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    reference::RankInput input;
    input.num_tokens = counts[static_cast<std::size_t>(rank)];
    input.x = random_tokens(problem.x_dtype, input.num_tokens, shape.hidden, seed, rank);
    input.topk_idx = random_selections(shape, input.num_tokens, seed, rank);
    Random weights(seed, kWeights, static_cast<std::uint64_t>(rank));
    for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
      input.topk_weights.push_back(weights.unit());
    }
    problem.ranks.push_back(std::move(input));
  }
  return problem;
}

}  // namespace tandem::tools
