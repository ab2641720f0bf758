#include "support/scenario.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "support/world.h"

namespace tandem::test {
namespace {

using Random = std::mt19937_64;

// Uniform in [0, bound), the same on every standard library.
std::int64_t below(Random& random, std::int64_t bound) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
}

// Values over several binary orders, both signs, some zeros: what formats find hard but legal.
float random_value(Random& random) {
  const std::uint64_t bits = random();
  if (bits % 16 == 0) return 0.0F;
  const float mantissa = 1.0F + static_cast<float>((bits >> 8) & 0xffffU) / 65536.0F;
  const int exponent = static_cast<int>((bits >> 24) % 13) - 8;
  return ((bits >> 40) & 1U) != 0 ? -std::ldexp(mantissa, exponent)
                                  : std::ldexp(mantissa, exponent);
}

std::vector<std::byte> random_values(Random& random, std::int64_t count, DType dtype) {
  std::vector<float> values(count);
  for (float& value : values) value = random_value(random);
  return encode(values, dtype);
}

std::int64_t random_negative(Random& random) {
  constexpr std::int64_t kNegatives[] = {-1, -1, -2, -1000, -2147483648LL};
  return kNegatives[below(random, std::size(kNegatives))];
}

// One token's choices.
void choose_experts(Random& random, const Shape& shape, std::int64_t* choice) {
  const int num_experts = shape.num_experts;
  std::fill_n(choice, shape.topk, -1);
  if (shape.routing == Routing::kNone) return;
  if (shape.routing == Routing::kRepeated) {
    for (int k = 0; k < shape.topk; ++k) choice[k] = below(random, num_experts);
    return;
  }
  std::vector<int> order(num_experts);
  std::iota(order.begin(), order.end(), 0);
  for (int index = 0; index + 1 < num_experts; ++index) {
    std::swap(order[index], order[index + below(random, num_experts - index)]);
  }
  if (shape.routing == Routing::kHot) {
    std::swap(order[0], *std::find(order.begin(), order.end(), 0));
  }
  for (int k = 0; k < std::min(shape.topk, num_experts); ++k) choice[k] = order[k];
  if (shape.routing != Routing::kMixed) return;
  const bool silent = below(random, 8) == 0;
  for (int k = 0; k < shape.topk; ++k) {
    if (silent || below(random, 8) == 0) choice[k] = random_negative(random);
  }
}

std::vector<std::byte> random_outputs(Random& random, const reference::RankOutput& received,
                                      int hidden, DType dtype) {
  const std::int64_t row_bytes = std::int64_t{hidden} * size_of(dtype);
  // All ones is a NaN in every format: whoever reads a row without a token is found out.
  std::vector<std::byte> y(received.num_rows * row_bytes, std::byte{0xff});
  for (std::int64_t row = 0; row < received.num_rows; ++row) {
    if (received.source_tokens[row] < 0) continue;
    const std::vector<std::byte> values = random_values(random, hidden, dtype);
    std::copy(values.begin(), values.end(), y.begin() + row * row_bytes);
  }
  return y;
}

}  // namespace

std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  std::byte* out = bytes.data();
  for (const float value : values) {
    if (dtype == DType::kBFloat16) {
      const bfloat16 narrow = to_bfloat16(value);
      std::memcpy(out, &narrow, sizeof(narrow));
    } else if (dtype == DType::kFloat16) {
      const float16 narrow = to_float16(value);
      std::memcpy(out, &narrow, sizeof(narrow));
    } else {
      std::memcpy(out, &value, sizeof(value));
    }
    out += size_of(dtype);
  }
  return bytes;
}

reference::Problem make_problem(const Shape& shape) {
  Random random(shape.seed);
  reference::Problem problem;
  problem.num_ranks = shape.num_ranks;
  problem.num_experts = shape.num_experts;
  problem.hidden = shape.hidden;
  problem.topk = shape.topk;
  problem.max_tokens = shape.max_tokens;
  problem.expert_owners = shape.expert_owners;
  problem.x_dtype = is_fp8(shape.format) ? shape.x_dtype : value_dtype(shape.format);
  problem.format = shape.format;
  problem.layout = shape.layout;
  problem.row_alignment = shape.row_alignment;
  problem.partial_sums = shape.partial_sums;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    reference::RankInput input;
    input.num_tokens = shape.tokens.empty() ? shape.max_tokens : shape.tokens[rank];
    input.x = random_values(random, std::int64_t{input.num_tokens} * shape.hidden, problem.x_dtype);
    input.topk_idx.resize(std::int64_t{input.num_tokens} * shape.topk);
    for (int token = 0; token < input.num_tokens; ++token) {
      choose_experts(random, shape, &input.topk_idx[std::int64_t{token} * shape.topk]);
    }
    input.topk_weights.resize(input.topk_idx.size());
    for (float& weight : input.topk_weights) weight = random_value(random);
    problem.ranks.push_back(std::move(input));
  }
  return problem;
}

Scenario solve(const Shape& shape, reference::Problem problem) {
  Random random(shape.seed + 0x9e3779b97f4a7c15ULL);
  Scenario scenario;
  scenario.shape = shape;
  scenario.problem = std::move(problem);
  scenario.received = reference::dispatch(scenario.problem);
  for (const reference::RankOutput& received : scenario.received) {
    scenario.y.push_back(random_outputs(random, received, shape.hidden, shape.combine_dtype));
  }
  scenario.out = reference::combine(scenario.problem, scenario.y, shape.combine_dtype);
  return scenario;
}

Scenario without(const Scenario& scenario, const std::vector<int>& masked) {
  const auto is_masked = [&](int rank) {
    return std::find(masked.begin(), masked.end(), rank) != masked.end();
  };
  std::vector<bool> lost(scenario.problem.num_experts);
  for (int rank = 0; rank < scenario.problem.num_ranks; ++rank) {
    if (!is_masked(rank)) continue;
    for (const int expert : scenario.received[rank].experts) lost[expert] = true;
  }
  reference::Problem problem = scenario.problem;
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    if (is_masked(rank)) problem.ranks[rank] = {};
    for (std::int64_t& expert : problem.ranks[rank].topk_idx) {
      if (expert >= 0 && lost[expert]) expert = -1;
    }
  }
  Scenario rest = solve(scenario.shape, std::move(problem));
  rest.problem.ranks = scenario.problem.ranks;
  return rest;
}

Scenario make_scenario(const Shape& shape) { return solve(shape, make_problem(shape)); }

std::vector<Scenario> make_scenarios(const std::vector<Shape>& shapes) {
  std::vector<Scenario> scenarios;
  for (const Shape& shape : shapes) scenarios.push_back(make_scenario(shape));
  return scenarios;
}

BufferOptions options_for(const std::vector<Shape>& shapes) {
  BufferOptions options{.backend = backend_under_test(),
                        .num_experts = shapes.front().num_experts,
                        .max_tokens = 1,
                        .max_hidden = 1,
                        .max_topk = 1,
                        .expert_owners = shapes.front().expert_owners,
                        .packed_placement = false,
                        .slotted_placement = false,
                        .padded_layout = false,
                        .timeout = std::chrono::seconds(20)};
  int alignment = 1;
  for (const Shape& shape : shapes) {
    options.max_tokens = std::max(options.max_tokens, shape.max_tokens);
    options.max_hidden = std::max(options.max_hidden, shape.hidden);
    options.max_topk = std::max(options.max_topk, shape.topk);
    if (shape.format == Format::kFloat32 || shape.combine_dtype == DType::kFloat32) {
      options.widest_format = Format::kFloat32;
    }
    const bool slotted = shape.placement == Placement::kSlotted ||
                         (shape.placement == Placement::kAutomatic && shape.hook);
    options.slotted_placement |= slotted;
    options.packed_placement |= !slotted;
    options.padded_layout |= shape.layout == Layout::kPadded;
    if (shape.layout == Layout::kPacked) alignment = std::max(alignment, shape.row_alignment);
  }
  // Aligned starts take room that the worst case of rows alone does not count.
  if (alignment > 1) {
    const std::int64_t tokens = std::int64_t{shapes.front().num_ranks} * options.max_tokens;
    const std::int64_t choices = std::min(options.max_topk, options.num_experts);
    const std::int64_t packed = tokens * choices + std::int64_t{options.num_experts} * alignment;
    const std::int64_t padded = options.padded_layout ? tokens * options.num_experts : 0;
    options.capacity_rows = std::max(packed, padded);
  }
  return options;
}

BufferOptions options_for(const Shape& shape) { return options_for(std::vector<Shape>{shape}); }

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  const auto list = [&out](const std::vector<int>& values) -> std::ostream& {
    out << "[";
    for (std::size_t index = 0; index < values.size(); ++index) {
      out << (index == 0 ? "" : " ") << values[index];
    }
    return out << "]";
  };
  out << "ranks " << shape.num_ranks << ", experts " << shape.num_experts << ", hidden "
      << shape.hidden << ", topk " << shape.topk << ", M " << shape.max_tokens << ", tokens ";
  list(shape.tokens) << ", owners ";
  list(shape.expert_owners) << ", format " << name(shape.format) << " of " << name(shape.x_dtype)
                            << ", " << name(shape.placement) << " placement, " << name(shape.layout)
                            << " layout, alignment " << shape.row_alignment << ", hook "
                            << shape.hook << ", indices " << name(shape.index_dtype) << ", combine "
                            << name(shape.combine_dtype) << ", zero-copy " << shape.zero_copy
                            << ", partial sums " << shape.partial_sums << ", row gap "
                            << shape.row_gap << ", routing " << static_cast<int>(shape.routing)
                            << ", seed " << shape.seed;
  return out;
}

}  // namespace tandem::test
