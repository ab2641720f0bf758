// The smallest whole round: four ranks, threads of this process, send their tokens to eight experts
// and get the weighted results back. Expert e multiplies by e + 1, so that every result is known.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

#include "tandem/tandem.h"

namespace {

constexpr int kRanks = 4;
constexpr int kExperts = 8;
constexpr int kTokens = 3;
constexpr int kTopk = 2;
constexpr int kHidden = 16;

void run_rank(const tandem::Communicator& communicator) {
  const int rank = communicator.rank();

  // Making a buffer is collective and allocates everything; the operations allocate nothing.
  tandem::Buffer buffer(communicator, {.num_experts = kExperts,
                                       .max_tokens = kTokens,
                                       .max_hidden = kHidden,
                                       .max_topk = kTopk,
                                       .widest_format = tandem::Format::kFloat32});

  // Token t of this rank goes to two experts; the second one weighs a quarter.
  std::vector<float> x;
  std::vector<std::int64_t> topk_idx;
  std::vector<float> topk_weights;
  for (int token = 0; token < kTokens; ++token) {
    x.insert(x.end(), kHidden, static_cast<float>(10 * rank + token));
    topk_idx.insert(topk_idx.end(), {(rank + token) % kExperts, (rank + token + 3) % kExperts});
    topk_weights.insert(topk_weights.end(), {0.75F, 0.25F});
  }

  // Dispatch: every token travels to the ranks that own its experts.
  const tandem::DispatchResult received = buffer.dispatch(
      tandem::view_of(x.data(), {kTokens, kHidden}),
      tandem::view_of(topk_idx.data(), {kTokens, kTopk}), {.format = tandem::Format::kFloat32});

  // received.x is a view [local experts, rows per expert, hidden] of the buffer's own memory. Its
  // rows may be further apart than they are long, so use its strides.
  const std::int64_t rows_per_expert = received.x.shape[1];
  const std::vector<int> local_experts = buffer.local_experts();
  const std::int64_t num_local = buffer.num_local_experts();
  std::vector<float> y(num_local * rows_per_expert * kHidden);
  for (std::int64_t local = 0; local < num_local; ++local) {
    const int count = received.counts.as<std::int32_t>()[local];
    std::printf("rank %d: expert %d received %d rows\n", rank, local_experts[local], count);
    for (std::int64_t row = 0; row < count; ++row) {
      const float* in =
          received.x.as<float>() + local * received.x.strides[0] + row * received.x.strides[1];
      float* out = y.data() + (local * rows_per_expert + row) * kHidden;
      for (int h = 0; h < kHidden; ++h) {
        out[h] = in[h] * static_cast<float>(local_experts[local] + 1);
      }
    }
  }

  // Combine: the results travel home and are added up with the weights.
  std::vector<float> out(x.size());
  buffer.combine(tandem::view_of(y.data(), {num_local, rows_per_expert, kHidden}),
                 tandem::view_of(topk_weights.data(), {kTokens, kTopk}), received.handle,
                 tandem::view_of(out.data(), {kTokens, kHidden}));

  for (int token = 0; token < kTokens; ++token) {
    const int first = (rank + token) % kExperts;
    const int second = (rank + token + 3) % kExperts;
    const float weight =
        0.75F * static_cast<float>(first + 1) + 0.25F * static_cast<float>(second + 1);
    for (int h = 0; h < kHidden; ++h) {
      const std::size_t at = static_cast<std::size_t>(token) * kHidden + h;
      if (out[at] != x[at] * weight) throw std::runtime_error("a combined value is wrong");
    }
  }
}

}  // namespace

int main() {
  try {
    tandem::run_threads(kRanks, run_rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hello_dispatch: %s\n", error.what());
    return 1;
  }
  std::printf("every token came back as expected\n");
  return 0;
}
