#include "soak/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

namespace {

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

// Owner of each expert.
std::vector<int> owners_of(const std::vector<reference::RankOutput>& ranks, int num_experts) {
  std::vector<int> owners(size(num_experts));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const int expert : ranks[rank].experts) owners[size(expert)] = static_cast<int>(rank);
  }
  return owners;
}

// Row by row, [num_rows, H] of the oracle's shape.
class Rows {
 public:
  Rows(const Memory& memory, const ConstTensorView& tensor, std::int64_t num_rows) {
    if (!tensor.has_value() || num_rows == 0) return;
    const auto rows = rows_of<const void>(tensor, 0, num_rows);
    bytes_.resize(size(rows.num_elements()) * size(size_of(rows.dtype)));
    memory.download(bytes_.data(), rows);
    width_ = bytes_.size() / size(num_rows);
  }
  [[nodiscard]] bool equal(std::size_t row, const std::vector<std::byte>& expected) const {
    return width_ == 0 ||
           std::memcmp(bytes_.data() + row * width_, expected.data() + row * width_, width_) == 0;
  }
  [[nodiscard]] bool zero(std::size_t row) const {
    const auto first = bytes_.begin() + static_cast<std::ptrdiff_t>(row * width_);
    return std::all_of(first, first + static_cast<std::ptrdiff_t>(width_),
                       [](std::byte byte) { return byte == std::byte{0}; });
  }

 private:
  std::vector<std::byte> bytes_;
  std::size_t width_ = 0;
};

}  // namespace

const Outcome& Judge::outcome(const SoakCase& one, const Present& present) {
  const auto [found, is_new] = outcomes_.try_emplace({&one, present});
  Outcome& outcome = found->second;
  if (!is_new) return outcome;
  outcome.problem = one.inputs.problem;
  const bool all = std::find(present.begin(), present.end(), false) == present.end();
  if (!all) {
    const std::vector<int> owners =
        owners_of(reference::dispatch(outcome.problem), outcome.problem.num_experts);
    for (std::size_t rank = 0; rank < present.size(); ++rank) {
      reference::RankInput& input = outcome.problem.ranks[rank];
      if (!present[rank]) input = {};
      for (std::int64_t& expert : input.topk_idx) {
        if (expert >= 0 && !present[size(owners[size(expert)])]) expert = -1;
      }
    }
  }
  outcome.received = reference::dispatch(outcome.problem);
  for (const reference::RankOutput& output : outcome.received) {
    outcome.y.push_back(expert_outputs(output, outcome.problem.hidden, one.combination.format));
  }
  return outcome;
}

std::string Judge::compare(const SoakCase& one, const Outcome& outcome,
                           const DispatchResult& result, const Present& present) const {
  const reference::RankOutput& expected = outcome.received[size(rank_)];
  if (memory_.download<std::int32_t>(result.counts) != expected.counts) return "counts differ";
  if (memory_.download<std::int64_t>(result.offsets) != expected.offsets) return "offsets differ";
  if (memory_.download<std::int64_t>(result.ranges) != expected.ranges) return "ranges differ";
  const Rows values(memory_, result.x, expected.num_rows);
  const Rows scales(memory_, result.scales, expected.num_rows);
  std::vector<std::int32_t> tokens;
  if (expected.num_rows > 0) {
    tokens = memory_.download<std::int32_t>(
        rows_of<const void>(result.source_tokens, 0, expected.num_rows));
  }
  for (std::size_t row = 0; row < size(expected.num_rows); ++row) {
    const std::int32_t token = expected.source_tokens[row];
    if (token < 0) continue;
    const int source = expected.source_ranks[row];
    const bool right = tokens[row] == token && values.equal(row, expected.values) &&
                       scales.equal(row, expected.scales);
    const bool lost =
        !present[size(source)] && tokens[row] == -1 && values.zero(row) && scales.zero(row);
    if (!right && !lost) {
      return fmt::format("row {} (token {} of rank {}, {}) is wrong", row, token, source,
                         describe(one.combination));
    }
  }
  return {};
}

const Outcome* Judge::received(const SoakCase& one, const DispatchResult& result,
                               const Present& present, const Present& possible, std::string& why) {
  std::vector<std::size_t> lost;
  for (std::size_t rank = 0; rank < present.size(); ++rank) {
    if (possible[rank] && !present[rank]) lost.push_back(rank);
  }
  for (std::uint64_t counted = 0; counted < std::uint64_t{1} << lost.size(); ++counted) {
    Present candidate = present;
    for (std::size_t i = 0; i < lost.size(); ++i) candidate[lost[i]] = (counted >> i & 1) != 0;
    const Outcome& expected = outcome(one, candidate);
    const std::string difference = compare(one, expected, result, present);
    if (counted == 0) why = difference;
    if (!difference.empty()) continue;
    why.clear();
    return &expected;
  }
  if (!lost.empty()) why += ", also with any of the lost";
  return nullptr;
}

std::string Judge::combined(const SoakCase& one, const Outcome& outcome, const ConstTensorView& out,
                            const Present& present) const {
  reference::Problem problem = outcome.problem;
  const std::vector<int> owners = owners_of(outcome.received, problem.num_experts);
  reference::RankInput& input = problem.ranks[size(rank_)];
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    const std::int64_t expert = input.topk_idx[i];
    if (expert >= 0 && !present[size(owners[size(expert)])]) input.topk_weights[i] = 0;
  }
  const std::vector<std::byte> expected =
      reference::combine(problem, outcome.y, token_dtype(one.combination.format))[size(rank_)];
  std::vector<std::byte> seen(expected.size());
  if (!seen.empty()) memory_.download(seen.data(), out);
  const auto [at, wanted] = std::mismatch(seen.begin(), seen.end(), expected.begin());
  if (at == seen.end()) return {};
  return fmt::format("combined byte {} is {:#x}, expected {:#x} ({})", at - seen.begin(),
                     static_cast<int>(*at), static_cast<int>(*wanted), describe(one.combination));
}

}  // namespace tandem::tools
