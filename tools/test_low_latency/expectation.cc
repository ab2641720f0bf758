#include "test_low_latency/expectation.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"
#include "test_low_latency/results_hash.h"

namespace tandem::tools {

namespace {

// The oracle stores every row in full: it is given so many tokens at a time that its floats stay
// below this. Tokens do not influence each other.
constexpr std::int64_t kMaxOracleBytes = std::int64_t{64} << 20;

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

// The same problem with tokens [first, first + count) of each rank, as the packed layout.
reference::Problem part_of(const reference::Problem& whole, int first, int count) {
  reference::Problem part = whole;
  part.layout = Layout::kPacked;
  part.max_tokens = count;
  const std::int64_t token_bytes = std::int64_t{whole.hidden} * size_of(whole.x_dtype);
  for (reference::RankInput& input : part.ranks) {
    const std::int64_t begin = std::min(first, input.num_tokens);
    const std::int64_t end = std::min(first + count, input.num_tokens);
    const auto cut = [&](auto& values, std::int64_t per_token) {
      values = {values.begin() + begin * per_token, values.begin() + end * per_token};
    };
    cut(input.x, token_bytes);
    cut(input.topk_idx, whole.topk);
    cut(input.topk_weights, whole.topk);
    input.num_tokens = static_cast<int>(end - begin);
  }
  return part;
}

// Stores what the oracle put in each row under the row's source token.
void keep_encoded(const reference::RankOutput& output, int first, std::size_t value_bytes,
                  std::size_t scale_bytes, std::vector<EncodedTokens>& encoded,
                  std::vector<std::vector<bool>>& known) {
  const auto keep = [](std::vector<std::byte>& tokens, std::size_t token,
                       const std::vector<std::byte>& rows, std::size_t row, std::size_t bytes,
                       bool again) {
    if (bytes == 0) return;
    std::byte* const stored = tokens.data() + token * bytes;
    const std::byte* const found = rows.data() + row * bytes;
    if (again && std::memcmp(stored, found, bytes) != 0) {
      throw std::logic_error("the oracle encodes one token in two ways");
    }
    std::memcpy(stored, found, bytes);
  };
  for (std::size_t row = 0; row < size(output.num_rows); ++row) {
    if (output.source_tokens[row] < 0) continue;
    const auto rank = size(output.source_ranks[row]);
    const auto token = size(first + output.source_tokens[row]);
    const bool again = known[rank][token];
    keep(encoded[rank].values, token, output.values, row, value_bytes, again);
    keep(encoded[rank].scales, token, output.scales, row, scale_bytes, again);
    known[rank][token] = true;
  }
}

Expectation make_expectation(const Shape& shape, std::uint64_t seed, Format format,
                             const Arrivals& arrivals) {
  Expectation expectation;
  expectation.problem = make_problem(shape, seed, format);
  const reference::Problem& problem = expectation.problem;
  const DType dtype = token_dtype(format);
  const std::size_t token_bytes = size(problem.hidden) * size(size_of(dtype));
  const std::size_t value_bytes = size(problem.hidden) * size(size_of(value_dtype(format)));
  const std::size_t scale_bytes = size(num_scales(format, problem.hidden)) * 4;

  std::vector<std::vector<bool>> known;
  for (const reference::RankInput& input : problem.ranks) {
    const std::size_t num_tokens = size(input.num_tokens);
    expectation.encoded.push_back({std::vector<std::byte>(num_tokens * value_bytes),
                                   std::vector<std::byte>(num_tokens * scale_bytes)});
    expectation.combined.emplace_back(num_tokens * token_bytes);
    known.emplace_back(num_tokens);
  }

  const std::int64_t bytes_per_token =
      std::int64_t{problem.num_ranks} * problem.topk * problem.hidden * 4;
  const int step = static_cast<int>(
      std::clamp<std::int64_t>(kMaxOracleBytes / bytes_per_token, 1, problem.max_tokens));
  for (int first = 0; first < problem.max_tokens; first += step) {
    const reference::Problem part = part_of(problem, first, step);
    std::vector<std::vector<std::byte>> y;
    for (const reference::RankOutput& output : reference::dispatch(part)) {
      keep_encoded(output, first, value_bytes, scale_bytes, expectation.encoded, known);
      y.push_back(expert_outputs(output, problem.hidden, format));
    }
    const auto combined = reference::combine(part, y, dtype);
    for (std::size_t rank = 0; rank < combined.size(); ++rank) {
      if (combined[rank].empty()) continue;
      std::memcpy(expectation.combined[rank].data() + size(first) * token_bytes,
                  combined[rank].data(), combined[rank].size());
    }
  }
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    expectation.hashes.push_back(expected_hash(expectation, arrivals, rank));
  }
  return expectation;
}

Arrivals make_arrivals(const Shape& shape, std::uint64_t seed, Layout layout) {
  Shape narrow = shape;
  narrow.hidden = 1;
  reference::Problem problem = make_problem(narrow, seed, Format::kBFloat16);
  problem.layout = layout;
  return reference::dispatch(problem);
}

}  // namespace

std::vector<std::byte> expert_outputs(const reference::RankOutput& output, int hidden,
                                      Format format) {
  const std::vector<float> x = reference::dequantise(output, hidden, format);
  const DType dtype = token_dtype(format);
  std::vector<std::byte> y(x.size() * size(size_of(dtype)));
  const auto width = size(hidden);
  const auto y_width = width * size(size_of(dtype));
  for (std::size_t local = 0; local < output.experts.size(); ++local) {
    const std::size_t row = size(output.offsets[local]);
    const std::size_t count = size(output.counts[local]);
    apply_expert(output.experts[local], std::span(x).subspan(row * width, count * width), dtype,
                 std::span(y).subspan(row * y_width, count * y_width));
  }
  return y;
}

Scenario make_scenario(const Shape& shape, std::uint64_t seed,
                       const std::vector<Combination>& combinations) {
  Scenario scenario{.seed = seed};
  std::set<Format> formats;
  for (const Combination& combination : combinations) {
    formats.insert(combination.format);
    if (!scenario.arrivals.contains(combination.layout)) {
      scenario.arrivals[combination.layout] = make_arrivals(shape, seed, combination.layout);
    }
  }
  if (scenario.arrivals.empty()) return scenario;
  const Arrivals& arrivals = scenario.arrivals.begin()->second;  // hashes are alike for all layouts

  const std::size_t width = std::max(std::thread::hardware_concurrency(), 1U);
  std::vector<std::pair<Format, std::future<Expectation>>> running;
  const auto collect = [&] {
    for (auto& [format, future] : running) scenario.expectations[format] = future.get();
    running.clear();
  };
  for (const Format format : formats) {
    running.emplace_back(format, std::async(std::launch::async, [&shape, &arrivals, seed, format] {
                           return make_expectation(shape, seed, format, arrivals);
                         }));
    if (running.size() == width) collect();
  }
  collect();
  return scenario;
}

std::int64_t scenario_bytes(const Shape& shape, const std::vector<Combination>& combinations) {
  std::set<Format> formats;
  for (const Combination& combination : combinations) formats.insert(combination.format);
  std::int64_t bytes_per_token = 64 * shape.topk;
  for (const Format format : formats) {  // x, encoded, combined
    bytes_per_token += shape.hidden * (2 * std::int64_t{size_of(token_dtype(format))} +
                                       size_of(value_dtype(format)));
  }
  // And the padded layout's table of sources, 24 bytes a row at most, of R * M rows an expert.
  return std::int64_t{shape.ranks} * shape.tokens * (bytes_per_token + 24 * shape.experts);
}

}  // namespace tandem::tools
