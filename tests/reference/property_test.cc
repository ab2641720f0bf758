// What must hold of the oracle for any shape and routing. RapidCheck draws them and prints its seed
// with a failure; RC_PARAMS="seed=..." repeats it.
#include <gtest/gtest.h>
// After Google Test, which its own header for it lacks.
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "reference/problem_builder.h"

namespace tandem::reference {
namespace {

constexpr int kMaxTokens = 6;

// Uniform from the first case on: RapidCheck's own ranges start at nothing and widen slowly.
template <typename T>
rc::Gen<T> uniform(T low, T high) {
  return rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(low, high));
}

// A problem of float32 tokens with some selections of nothing and some repeated experts. M leaves
// room for every selection to be of the same expert.
Problem any_problem(Format format) {
  Problem problem{.x_dtype = DType::kFloat32, .format = format};
  problem.num_ranks = *uniform(1, 6);
  problem.num_experts = *uniform(1, 13);
  problem.topk = *uniform(1, 7);
  problem.hidden = *rc::gen::element(1, 3, 127, 128, 130, 300);
  problem.max_tokens = kMaxTokens * problem.topk;
  problem.layout = *rc::gen::element(Layout::kPadded, Layout::kPacked);
  problem.row_alignment = *uniform(1, 6);
  if (*rc::gen::arbitrary<bool>()) {
    problem.expert_owners =
        *rc::gen::container<std::vector<int>>(problem.num_experts, uniform(0, problem.num_ranks));
  }
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    const int num_tokens = *uniform(0, kMaxTokens + 1);
    const int selections = num_tokens * problem.topk;
    const auto topk_idx = *rc::gen::container<std::vector<std::int64_t>>(
        selections, uniform<std::int64_t>(-2, problem.num_experts));
    const auto weights = *rc::gen::container<std::vector<float>>(
        selections,
        rc::gen::map(uniform(-1000, 1001), [](int thousandths) { return thousandths / 1000.0F; }));
    // Distinct in rank, token and channel, over several binades.
    std::vector<float> x(static_cast<std::size_t>(num_tokens) * problem.hidden);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float magnitude = std::ldexp(static_cast<float>(i + 1), -static_cast<int>(i % 9));
      x[i] = (i % 3 == 0 ? -1.0F : 1.0F) * (magnitude + 1000.0F * static_cast<float>(rank));
    }
    problem.ranks.push_back(rank_input(num_tokens, x, topk_idx, weights));
  }
  return problem;
}

std::int64_t selected_expert(const Problem& problem, int source, std::int64_t token, int k) {
  return problem.ranks[source].topk_idx[token * problem.topk + k];
}

// (expert, source, token) of every selection, or of every row received.
using Delivery = std::tuple<std::int64_t, int, int>;

std::vector<Delivery> all_selections(const Problem& problem) {
  std::vector<Delivery> result;
  for (int source = 0; source < problem.num_ranks; ++source) {
    for (int token = 0; token < problem.ranks[source].num_tokens; ++token) {
      for (int k = 0; k < problem.topk; ++k) {
        const std::int64_t expert = selected_expert(problem, source, token, k);
        if (expert >= 0) result.emplace_back(expert, source, token);
      }
    }
  }
  std::sort(result.begin(), result.end());
  return result;
}

RC_GTEST_PROP(OracleProperty, EverySelectionArrivesOnceInOrder, ()) {
  const Problem problem = any_problem(Format::kFloat32);
  std::vector<Delivery> received;
  for (const RankOutput& output : dispatch(problem)) {
    std::int64_t num_valid = 0;
    for (std::size_t local = 0; local < output.experts.size(); ++local) {
      std::vector<Delivery> rows;  // of this expert
      for (std::int64_t i = 0; i < output.counts[local]; ++i) {
        const std::int64_t row = output.offsets[local] + i;
        rows.emplace_back(output.experts[local], output.source_ranks[row],
                          output.source_tokens[row]);
      }
      RC_ASSERT(std::is_sorted(rows.begin(), rows.end()));
      received.insert(received.end(), rows.begin(), rows.end());
      num_valid += output.counts[local];
    }
    // No other row claims to hold a token.
    RC_ASSERT(std::count(output.source_tokens.begin(), output.source_tokens.end(), -1) ==
              output.num_rows - num_valid);
  }
  std::sort(received.begin(), received.end());
  RC_ASSERT(received == all_selections(problem));
}

RC_GTEST_PROP(OracleProperty, CountsAndRangesAreTheHistogram, ()) {
  const Problem problem = any_problem(Format::kFloat32);
  const std::vector<Delivery> selections = all_selections(problem);
  for (const RankOutput& output : dispatch(problem)) {
    RC_ASSERT(output.offsets.size() == output.experts.size() + 1);
    RC_ASSERT(output.offsets.back() == output.num_rows);
    for (std::size_t local = 0; local < output.experts.size(); ++local) {
      std::int64_t begin = 0;
      for (int source = 0; source < problem.num_ranks; ++source) {
        const auto count =
            std::count_if(selections.begin(), selections.end(), [&](const Delivery& selection) {
              return std::get<0>(selection) == output.experts[local] &&
                     std::get<1>(selection) == source;
            });
        RC_ASSERT(output.ranges[local * problem.num_ranks + source] == range(begin, count));
        begin += count;
      }
      RC_ASSERT(output.counts[local] == begin);
      RC_ASSERT(output.offsets[local] + begin <= output.offsets[local + 1]);
    }
  }
}

RC_GTEST_PROP(OracleProperty, RowsHoldTheirTokens, ()) {
  const Problem problem = any_problem(Format::kFloat32);
  for (const RankOutput& output : dispatch(problem)) {
    const auto values = values_of<float>(output.values);
    for (std::int64_t row = 0; row < output.num_rows; ++row) {
      if (output.source_tokens[row] < 0) continue;
      const auto x = values_of<float>(problem.ranks[output.source_ranks[row]].x);
      const auto begin = x.begin() + output.source_tokens[row] * problem.hidden;
      RC_ASSERT(std::equal(begin, begin + problem.hidden, values.begin() + row * problem.hidden));
    }
  }
}

RC_GTEST_PROP(OracleProperty, Fp8IsWithinHalfAStepOfTheValue, ()) {
  const Format format = *rc::gen::element(Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0);
  const Problem problem = any_problem(format);
  for (const RankOutput& output : dispatch(problem)) {
    const std::vector<float> back = dequantise(output, problem.hidden, format);
    for (std::int64_t row = 0; row < output.num_rows; ++row) {
      if (output.source_tokens[row] < 0) continue;
      const auto x = values_of<float>(problem.ranks[output.source_ranks[row]].x);
      const auto begin = x.begin() + output.source_tokens[row] * problem.hidden;
      for (int h = 0; h < problem.hidden; ++h) {
        const int group = h / kFp8GroupSize * kFp8GroupSize;
        const auto end = begin + std::min(group + kFp8GroupSize, problem.hidden);
        const float amax = std::abs(*std::max_element(
            begin + group, end, [](float a, float b) { return std::abs(a) < std::abs(b); }));
        // Four bits of precision: half a step is 1/16 of the value, or of the least normal; scales
        // are at most 2 * amax / 448.
        const float least_normal = 2 * amax / 448 * 0x1p-6F;
        const float tolerance = std::max(std::abs(begin[h]), least_normal) / 16 * 1.00001F;
        RC_ASSERT(std::abs(back[row * problem.hidden + h] - begin[h]) <= tolerance);
      }
    }
  }
}

// Experts that return what they are given.
std::vector<std::vector<std::byte>> identity_experts(const Problem& problem) {
  std::vector<std::vector<std::byte>> y;
  for (const RankOutput& output : dispatch(problem)) y.push_back(output.values);
  return y;
}

RC_GTEST_PROP(OracleProperty, EqualWeightsOfIdentityExpertsReturnTheToken, ()) {
  Problem problem = any_problem(Format::kFloat32);
  for (RankInput& input : problem.ranks) {  // weights 1 / (experts selected)
    for (int token = 0; token < input.num_tokens; ++token) {
      const auto first = input.topk_idx.begin() + token * problem.topk;
      const auto selected =
          std::count_if(first, first + problem.topk, [](std::int64_t e) { return e >= 0; });
      for (int k = 0; k < problem.topk; ++k) {
        input.topk_weights[token * problem.topk + k] = 1.0F / static_cast<float>(selected);
      }
    }
  }
  const auto out = combine(problem, identity_experts(problem), DType::kFloat32);
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    const auto x = values_of<float>(problem.ranks[rank].x);
    const auto result = values_of<float>(out[rank]);
    RC_ASSERT(result.size() == x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      bool any = false;
      for (int k = 0; k < problem.topk; ++k) {
        const auto token = static_cast<std::int64_t>(i) / problem.hidden;
        any = any || selected_expert(problem, rank, token, k) >= 0;
      }
      const float expected = any ? x[i] : 0.0F;
      // A rounding for the weight, and one for each product and sum.
      const float tolerance =
          std::abs(expected) * 0x1p-24F * static_cast<float>(2 * problem.topk + 1);
      RC_ASSERT(std::abs(result[i] - expected) <= tolerance);
    }
  }
}

RC_GTEST_PROP(OracleProperty, SumsDoNotDependOnTheNumberOfRanks, ()) {
  const Problem spread = any_problem(Format::kFloat32);
  Problem alone = spread;  // all tokens, in order of ranks, on one rank that owns all experts
  alone.num_ranks = 1;
  alone.expert_owners.clear();
  alone.max_tokens = spread.max_tokens * spread.num_ranks;
  alone.ranks = {RankInput{}};
  RankInput& all = alone.ranks[0];
  for (const RankInput& input : spread.ranks) {
    all.num_tokens += input.num_tokens;
    all.x.insert(all.x.end(), input.x.begin(), input.x.end());
    all.topk_idx.insert(all.topk_idx.end(), input.topk_idx.begin(), input.topk_idx.end());
    all.topk_weights.insert(all.topk_weights.end(), input.topk_weights.begin(),
                            input.topk_weights.end());
  }
  const auto parts = combine(spread, identity_experts(spread), DType::kFloat32);
  std::vector<std::byte> joined;
  for (const auto& part : parts) joined.insert(joined.end(), part.begin(), part.end());
  RC_ASSERT(joined == combine(alone, identity_experts(alone), DType::kFloat32)[0]);
}

RC_GTEST_PROP(OracleProperty, CapacityIsTheRowsOfTheFullestRank, ()) {
  const Problem problem = any_problem(Format::kFloat32);
  std::int64_t most = 0;
  for (const RankOutput& output : dispatch(problem)) most = std::max(most, output.num_rows);
  RC_ASSERT(!exceeds_capacity(problem, Placement::kPacked, most));
  RC_ASSERT(most == 0 || exceeds_capacity(problem, Placement::kPacked, most - 1));
}

}  // namespace
}  // namespace tandem::reference
