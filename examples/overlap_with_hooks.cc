// Work while tokens travel. With a hook, an operation only sends; the hook receives, later, when
// its rows are needed. Between the two the rank does something else: here, a shared expert that
// every token passes through at home.
//
// A send with a hook waits for nobody, so the sender cannot know where a row will finally lie:
// rows land in slots, and the hook copies them into a tensor that the caller provides.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

#include "tandem/tandem.h"

namespace {

constexpr int kRanks = 4;
constexpr int kExperts = 6;
constexpr int kTokens = 16;
constexpr int kTopk = 2;
constexpr int kHidden = 64;

// The shared expert: 2 x.
void run_shared_expert(const std::vector<float>& x, std::vector<float>& out) {
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = 2.0F * x[i];
}

void run_rank(const tandem::Communicator& communicator) {
  const int rank = communicator.rank();
  tandem::Buffer buffer(communicator, {.num_experts = kExperts,
                                       .max_tokens = kTokens,
                                       .max_hidden = kHidden,
                                       .max_topk = kTopk,
                                       .widest_format = tandem::Format::kFloat32});

  std::vector<float> x(kTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + rank);
  // A negative index selects nothing: every fourth token of this rank has no second expert.
  std::vector<std::int64_t> topk_idx;
  for (int token = 0; token < kTokens; ++token) {
    topk_idx.insert(topk_idx.end(),
                    {token % kExperts, token % 4 == 0 ? -1 : (token + 1 + rank) % kExperts});
  }
  const std::vector<float> topk_weights(kTokens * kTopk, 0.25F);

  const std::int64_t num_local = buffer.num_local_experts();
  const std::int64_t rows_per_expert = kRanks * kTokens;
  std::vector<float> rows(num_local * rows_per_expert * kHidden);
  const tandem::TensorView rows_view =
      tandem::view_of(rows.data(), {num_local, rows_per_expert, kHidden});

  // Send, compute, receive.
  const tandem::DispatchResult received = buffer.dispatch(
      tandem::view_of(x.data(), {kTokens, kHidden}),
      tandem::view_of(topk_idx.data(), {kTokens, kTopk}),
      {.format = tandem::Format::kFloat32, .return_hook = true, .recv_x = rows_view});
  std::vector<float> shared(x.size());
  run_shared_expert(x, shared);
  received.hook();  // from here on counts, rows and everything else in `received` are complete

  // The routed experts, in place: expert e adds e.
  const std::vector<int> local_experts = buffer.local_experts();
  for (std::int64_t local = 0; local < num_local; ++local) {
    float* expert_rows = rows.data() + local * rows_per_expert * kHidden;
    const std::int64_t values = std::int64_t{received.counts.as<std::int32_t>()[local]} * kHidden;
    for (std::int64_t i = 0; i < values; ++i) {
      expert_rows[i] += static_cast<float>(local_experts[local]);
    }
  }

  // The same on the way back.
  std::vector<float> routed(x.size());
  const tandem::Hook receive_results = buffer.combine(
      rows_view, tandem::view_of(topk_weights.data(), {kTokens, kTopk}), received.handle,
      tandem::view_of(routed.data(), {kTokens, kHidden}), {.return_hook = true});
  // ... the next layer's work that does not need the routed experts goes here ...
  receive_results();

  for (std::size_t i = 0; i < x.size(); ++i) {
    float expected = 2.0F * x[i];
    for (int k = 0; k < kTopk; ++k) {
      const std::int64_t expert = topk_idx[i / kHidden * kTopk + k];
      if (expert >= 0) expected += 0.25F * (x[i] + static_cast<float>(expert));
    }
    if (shared[i] + routed[i] != expected) throw std::runtime_error("a combined value is wrong");
  }
}

}  // namespace

int main() {
  try {
    tandem::run_threads(kRanks, run_rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overlap_with_hooks: %s\n", error.what());
    return 1;
  }
  std::printf("%d ranks overlapped dispatch and combine with work of their own\n", kRanks);
  return 0;
}
