// Long runs: many operations without a barrier of the host between them, one rank delayed at
// random; and a million rows that each carry who they are.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "support/exchange.h"

namespace tandem::test {
namespace {

// Sanitizers slow every access down; they look for other things than rare interleavings.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kScale = 10;
#else
constexpr int kScale = 1;
#endif

void delay(std::mt19937& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
}

// Report: a thousand dispatch/combine pairs without a barrier, with one rank late at random.
TEST(Soak, ThousandPairsWithRandomDelaysOnOneRank) {
  constexpr int kNumPairs = 1000 / kScale;
  std::vector<Shape> shapes;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Shape shape{.num_ranks = 3, .num_experts = 6, .hidden = 40, .topk = 3};
    shape.tokens = {static_cast<int>(seed % 9), 8, static_cast<int>(seed * 3 % 9)};
    shape.placement = seed % 2 == 0 ? Placement::kSlotted : Placement::kPacked;
    shape.hook = seed % 4 == 0;
    shape.zero_copy = seed % 3 == 0;
    shape.format = seed % 5 == 0 ? Format::kFp8 : Format::kBFloat16;
    shape.layout = seed % 2 == 0 ? Layout::kPadded : Layout::kPacked;
    shape.seed = seed;
    shapes.push_back(shape);
  }
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  run_ranks(3, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shapes));
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (const Scenario& scenario : scenarios) {
      exchanges.push_back(std::make_unique<Exchange>(rank, scenario, buffer));
    }
    std::mt19937 random(7);
    for (int pair = 0; pair < kNumPairs && rank.failures().empty(); ++pair) {
      const bool late = rank.index() == pair / 100 % 3;
      Exchange& exchange = *exchanges[pair % exchanges.size()];
      if (late) delay(random);
      exchange.dispatch(buffer);
      if (late) delay(random);
      exchange.finish_dispatch();
      exchange.check_received();
      exchange.provide_outputs(buffer);
      if (late) delay(random);
      exchange.combine(buffer);
      if (late) delay(random);
      exchange.finish_combine();
      exchange.check_combined();
    }
  });
}

constexpr int kHidden = 16;

// Sixteen channels that say who a row is and when it was sent.
void write_identity(int rank, int token, int iteration, std::uint16_t* row) {
  row[0] = static_cast<std::uint16_t>(rank);
  row[1] = static_cast<std::uint16_t>(token);
  row[2] = static_cast<std::uint16_t>(iteration);
  std::uint32_t hash = 0x9e3779b9U;
  for (int channel = 0; channel < 3; ++channel) hash = (hash ^ row[channel]) * 0x85ebca6bU;
  for (int channel = 3; channel < kHidden; ++channel) {
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae35U;
    row[channel] = static_cast<std::uint16_t>(hash >> 16);
  }
}

int expert_of(int rank, int token, int k, int iteration, int num_experts) {
  return (token * 7 + rank * 3 + iteration * 5 + k * 2 + token * k) % num_experts;
}

// Every received row is the one that its source index claims, this time and not another.
int count_wrong_rows(const DispatchResult& result, int num_ranks, int iteration, void* stream) {
  const auto counts = download_as<std::int32_t>(result.counts, stream);
  const auto ranges = download_as<std::int64_t>(result.ranges, stream);
  const auto sources = download_as<std::int32_t>(result.source_tokens, stream);
  const auto rows = download_as<std::uint16_t>(result.x, stream);
  const std::int64_t rows_each = result.x.shape[1];
  std::uint16_t expected[kHidden];
  int wrong = 0;
  for (std::size_t local = 0; local < counts.size(); ++local) {
    for (int source = 0; source < num_ranks; ++source) {
      const std::int64_t range = ranges[local * num_ranks + source];
      const std::int64_t first = static_cast<std::int64_t>(local) * rows_each + (range >> 32);
      for (std::int64_t row = first; row < first + (range & 0xffffffff); ++row) {
        write_identity(source, sources[row], iteration, expected);
        wrong += std::memcmp(expected, &rows[row * kHidden], sizeof(expected)) != 0 ? 1 : 0;
      }
    }
  }
  return wrong;
}

// Report: a soak in which, once in hundreds of thousands of rows, one was another's.
TEST(Soak, NoRowOfAMillionIsWrong) {
  constexpr int kNumRanks = 4;
  constexpr int kNumTokens = 64;
  constexpr int kTopk = 4;
  constexpr int kNumExperts = 16;
  constexpr int kNumIterations = 1'000'000 / (kNumRanks * kNumTokens * kTopk) / kScale + 1;
  run_ranks(kNumRanks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), {.backend = backend_under_test(),
                                        .num_experts = kNumExperts,
                                        .max_tokens = kNumTokens,
                                        .max_hidden = kHidden,
                                        .max_topk = kTopk,
                                        .timeout = std::chrono::seconds(20)});
    const Array x(backend_under_test(), DType::kBFloat16, {kNumTokens, kHidden});
    const Array indices(backend_under_test(), DType::kInt32, {kNumTokens, kTopk});
    std::vector<std::uint16_t> rows(kNumTokens * kHidden);
    std::vector<std::int32_t> choices(kNumTokens * kTopk);
    int wrong = 0;
    for (int iteration = 0; iteration < kNumIterations && wrong == 0; ++iteration) {
      for (int token = 0; token < kNumTokens; ++token) {
        write_identity(rank.index(), token, iteration, &rows[token * kHidden]);
        for (int k = 0; k < kTopk; ++k) {
          const int expert = expert_of(rank.index(), token, k, iteration, kNumExperts);
          choices[token * kTopk + k] = expert;
          for (int before = 0; before < k; ++before) {
            if (choices[token * kTopk + before] == expert) choices[token * kTopk + k] = -1;
          }
        }
      }
      upload(x, reinterpret_cast<const std::byte*>(rows.data()), rank.stream());
      upload(indices, reinterpret_cast<const std::byte*>(choices.data()), rank.stream());
      rank.fence();
      const DispatchResult result = buffer.dispatch(x, indices, {.stream = rank.stream()});
      rank.fence();
      wrong = count_wrong_rows(result, kNumRanks, iteration, rank.stream());
      rank.expect_equal(wrong, 0, "wrong rows in iteration " + std::to_string(iteration));
    }
  });
}

}  // namespace
}  // namespace tandem::test
