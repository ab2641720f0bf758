// Scenario: one dispatch and its combine, with the inputs of all ranks and what must come out. Made
// once, before the ranks start, so that threads share it and forked processes inherit it.
#pragma once

#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "tandem/tandem.h"

namespace tandem::test {

// How tokens choose their experts. Unless said otherwise a token names an expert at most once, and
// has empty places where K > E.
enum class Routing : std::uint8_t {
  kMixed,     // distinct experts at random, some places negative, some tokens entirely so
  kFull,      // distinct experts at random, every place taken
  kHot,       // every token's first choice is expert 0
  kNone,      // every place is -1
  kRepeated,  // experts at random with repetitions: more rows than distinct choices can give
};

struct Shape {
  int num_ranks = 2;
  int num_experts = 8;
  int hidden = 64;
  int topk = 2;
  int max_tokens = 8;                   // M of the call
  std::vector<int> tokens = {};         // T of each rank; empty: M on all
  std::vector<int> expert_owners = {};  // as in BufferOptions
  Format format = Format::kBFloat16;
  DType x_dtype = DType::kBFloat16;  // for fp8; the other formats have their own
  Placement placement = Placement::kPacked;
  Layout layout = Layout::kPadded;
  int row_alignment = 1;
  bool hook = false;
  DType index_dtype = DType::kInt64;
  DType combine_dtype = DType::kBFloat16;
  bool zero_copy = false;
  bool partial_sums = false;  // weights go with tokens
  int row_gap = 0;            // channels between the rows of x and of out
  Routing routing = Routing::kMixed;
  std::uint64_t seed = 1;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);

struct Scenario {
  Shape shape;
  reference::Problem problem;
  std::vector<reference::RankOutput> received;  // [R]
  std::vector<std::vector<std::byte>> y;        // [R] of [num_rows, H]; rows without a token: NaN
  std::vector<std::vector<std::byte>> out;      // [R] of [T, H]

  [[nodiscard]] int num_tokens(int rank) const { return problem.ranks[rank].num_tokens; }
};

// Fills x, indices and weights from the seed, then asks the oracle.
[[nodiscard]] Scenario make_scenario(const Shape& shape);
[[nodiscard]] std::vector<Scenario> make_scenarios(const std::vector<Shape>& shapes);

// For tests that choose the inputs themselves: a problem with everything but the oracle's answers,
// to be changed and given to solve().
[[nodiscard]] reference::Problem make_problem(const Shape& shape);
[[nodiscard]] Scenario solve(const Shape& shape, reference::Problem problem);

// The same inputs, and what must come out where these ranks are masked: they bring no tokens, and
// what selects their experts selects nothing.
[[nodiscard]] Scenario without(const Scenario& scenario, const std::vector<int>& masked);

// A buffer that serves this shape and no more; memory as small as that allows.
[[nodiscard]] BufferOptions options_for(const Shape& shape);

// A buffer that serves all of them.
[[nodiscard]] BufferOptions options_for(const std::vector<Shape>& shapes);

// Bytes of `dtype` for these values, each rounded.
[[nodiscard]] std::vector<std::byte> encode(const std::vector<float>& values, DType dtype);

}  // namespace tandem::test
