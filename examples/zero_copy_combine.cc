// Experts that write their results straight to where the peers will read them. Three ranks, this
// time processes that the library forks, share memory that has no name and leaves nothing behind.
//
// The packed layout puts the rows of one expert right after those of the one before: what a grouped
// matrix multiplication wants, in a fraction of the padded layout's memory.
#include <cstdio>
#include <exception>
#include <vector>

#include "tandem/tandem.h"

namespace {

constexpr int kRanks = 3;
constexpr int kExperts = 7;  // any number over any number of ranks
constexpr int kTokens = 32;
constexpr int kTopk = 2;
constexpr int kHidden = 200;

// Distance between rows of a view, in elements.
std::int64_t row_stride(const tandem::TensorView& view) { return view.strides[view.num_dims - 2]; }

// The "expert": y = -x, over the rows that each local expert received.
void run_experts(const tandem::DispatchResult& received, int num_local, tandem::TensorView y) {
  const auto* counts = received.counts.as<std::int32_t>();
  const auto* offsets = received.offsets.as<std::int64_t>();
  for (int local = 0; local < num_local; ++local) {
    for (std::int64_t row = offsets[local]; row < offsets[local] + counts[local]; ++row) {
      const auto* in = received.x.as<tandem::bfloat16>() + row * row_stride(received.x);
      auto* out = y.as<tandem::bfloat16>() + row * row_stride(y);
      for (int h = 0; h < kHidden; ++h) out[h] = tandem::to_bfloat16(-tandem::to_float(in[h]));
    }
  }
}

// The exit code of this rank's process.
int run_rank(const tandem::Communicator& communicator) {
  tandem::Buffer buffer(communicator, {.num_experts = kExperts,
                                       .max_tokens = kTokens,
                                       .max_hidden = kHidden,
                                       .max_topk = kTopk,
                                       .slotted_placement = false,
                                       .padded_layout = false});

  std::vector<tandem::bfloat16> x(kTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] =
        tandem::to_bfloat16(static_cast<float>(i % 251) + static_cast<float>(communicator.rank()));
  }
  std::vector<std::int32_t> topk_idx(kTokens * kTopk);  // int32 and int64 are both understood
  for (std::size_t i = 0; i < topk_idx.size(); ++i) topk_idx[i] = static_cast<int>(i % kExperts);
  const std::vector<float> topk_weights(kTokens * kTopk, 0.5F);
  std::vector<tandem::bfloat16> out(x.size());

  // Twice: the buffer has two halves, so that a round can start while the last one is still read.
  for (int round = 0; round < 2; ++round) {
    const tandem::DispatchResult received =
        buffer.dispatch(tandem::view_of(x.data(), {kTokens, kHidden}),
                        tandem::view_of(topk_idx.data(), {kTokens, kTopk}),
                        {.layout = tandem::Layout::kPacked, .row_alignment = 8});

    // y lies in the memory that peers read: giving it to combine copies nothing.
    const tandem::TensorView y =
        buffer.next_combine_buffer(received.handle, tandem::DType::kBFloat16);
    run_experts(received, buffer.num_local_experts(), y);
    buffer.combine(y, tandem::view_of(topk_weights.data(), {kTokens, kTopk}), received.handle,
                   tandem::view_of(out.data(), {kTokens, kHidden}));

    for (std::size_t i = 0; i < x.size(); ++i) {  // 0.5 * -x + 0.5 * -x
      if (tandem::to_float(out[i]) != -tandem::to_float(x[i])) return 1;
    }
  }
  return 0;
}

}  // namespace

int main() {
  bool ok = true;
  try {
    const std::vector<tandem::ProcessExit> exits = tandem::run_processes(kRanks, run_rank);
    for (std::size_t rank = 0; rank < exits.size(); ++rank) {
      if (exits[rank].exit_code == 0 && exits[rank].signal == 0) continue;
      std::fprintf(stderr, "rank %zu: exit code %d, signal %d %s\n", rank, exits[rank].exit_code,
                   exits[rank].signal, exits[rank].error.c_str());
      ok = false;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zero_copy_combine: %s\n", error.what());
    return 1;
  }
  if (ok) std::printf("%d processes combined without a copy\n", kRanks);
  return ok ? 0 : 1;
}
