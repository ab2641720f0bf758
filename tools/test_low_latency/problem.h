// Random problems: who holds how many tokens, which experts live where, what tokens select and what
// they contain. Everything follows from the shape and the seed, on every machine alike.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/reference.h"
#include "test_low_latency/options.h"

namespace tandem::tools {

// The dtype of x, and of combined rows: the format's own, bf16 for the fp8 formats.
DType token_dtype(Format format);

// Tokens of each rank: all the same, or, uneven, one rank with none, one with `shape.tokens`, the
// others anywhere between. A single rank always has all of them.
std::vector<int> token_counts(const Shape& shape, std::uint64_t seed);

// Owner of each expert: empty (contiguous, as even as possible), or, uneven, drawn so that ranks
// own different numbers, in no order, and from three ranks up the last owns none.
std::vector<int> expert_owners(const Shape& shape);

// Selections [T, K] of one rank: for each token K different experts in random order (all experts
// and then -1, where there are fewer than K), with `shape.masked` selections of the rank, or as
// many as there are, set to -1.
std::vector<std::int64_t> random_selections(const Shape& shape, int num_tokens, std::uint64_t seed,
                                            int rank);

// The whole problem for one format, layout padded and alignment 1.
reference::Problem make_problem(const Shape& shape, std::uint64_t seed, Format format);

}  // namespace tandem::tools
