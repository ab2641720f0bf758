// What every rank must receive and get back, from the oracle. The padded layout has far more rows
// than tokens, so nothing is stored by row: which token belongs in which row is one thing
// (Arrivals, of the oracle on the same routing with one channel), what a token looks like on the
// wire another (once per source token).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "reference/reference.h"
#include "test_low_latency/options.h"

namespace tandem::tools {

struct EncodedTokens {
  std::vector<std::byte> values;  // [T, H]
  std::vector<std::byte> scales;  // [T, S], fp8 only
};

// For one format.
struct Expectation {
  reference::Problem problem;                    // inputs of all ranks
  std::vector<EncodedTokens> encoded;            // [R], by source; zeros where nothing was selected
  std::vector<std::vector<std::byte>> combined;  // [R], [T, H]
  std::vector<std::uint64_t> hashes;             // [R], as HashOfResults computes them
};

// Where rows must arrive, for one layout: [R].
using Arrivals = std::vector<reference::RankOutput>;

// Everything about one seed. Computed once, before ranks start, and only read by them.
struct Scenario {
  std::uint64_t seed = 0;
  std::map<Layout, Arrivals> arrivals = {};
  std::map<Format, Expectation> expectations = {};
};

// For the formats and layouts that the combinations name, on as many threads as there are cores;
// they have ended when it returns.
Scenario make_scenario(const Shape& shape, std::uint64_t seed,
                       const std::vector<Combination>& combinations);

// What the simulated experts make of an oracle's rows: [num_rows, H] of token_dtype(format).
std::vector<std::byte> expert_outputs(const reference::RankOutput& output, int hidden,
                                      Format format);

// Bytes that a scenario holds, about: to decide how many to hold at once.
std::int64_t scenario_bytes(const Shape& shape, const std::vector<Combination>& combinations);

}  // namespace tandem::tools
