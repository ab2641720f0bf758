#include "test_low_latency/operation.h"

#include <tuple>
#include <vector>

#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

BufferOptions buffer_options(const TestOptions& options, const Scenario& scenario,
                             const Combination& combination) {
  const reference::Problem& problem = scenario.expectations.at(combination.format).problem;
  BufferOptions buffer;
  buffer.backend = options.backend;
  buffer.num_experts = problem.num_experts;
  buffer.max_tokens = problem.max_tokens;
  buffer.max_hidden = problem.hidden;
  buffer.max_topk = problem.topk;
  buffer.widest_format =
      combination.format == Format::kFloat32 ? Format::kFloat32 : Format::kBFloat16;
  buffer.expert_owners = problem.expert_owners;
  buffer.packed_placement = combination.placement == Placement::kPacked;
  buffer.slotted_placement = combination.placement == Placement::kSlotted;
  buffer.padded_layout = combination.layout == Layout::kPadded;
  buffer.timeout = options.timeout;
  return buffer;
}

bool share_buffer(const Combination& a, const Combination& b) {
  const auto key = [](const Combination& combination) {
    return std::tuple(combination.placement, combination.layout,
                      combination.format == Format::kFloat32);
  };
  return key(a) == key(b);
}

Operation::Operation(Buffer& buffer, const Memory& memory, const Combination& combination,
                     const Expectation& expectation)
    : buffer_(buffer),
      memory_(memory),
      combination_(combination),
      dtype_(token_dtype(combination.format)) {
  const reference::Problem& problem = expectation.problem;
  const auto& input = problem.ranks[static_cast<std::size_t>(buffer.rank())];
  const std::int64_t hidden = problem.hidden;
  x_ = memory.array_of(input.x.data(), problem.x_dtype, {input.num_tokens, hidden});
  wide_indices_ =
      memory.array_of(input.topk_idx.data(), DType::kInt64, {input.num_tokens, problem.topk});
  const std::vector<std::int32_t> narrow(input.topk_idx.begin(), input.topk_idx.end());
  narrow_indices_ = memory.array_of(narrow.data(), DType::kInt32, {input.num_tokens, problem.topk});
  weights_ =
      memory.array_of(input.topk_weights.data(), DType::kFloat32, {input.num_tokens, problem.topk});
  out_ = memory.array(dtype_, {input.num_tokens, hidden});

  const std::int64_t num_local = buffer.num_local_experts();
  const std::int64_t padded_rows = std::int64_t{buffer.num_ranks()} * problem.max_tokens;
  const auto rows_array = [&](DType dtype, std::int64_t width) {
    return combination.layout == Layout::kPadded
               ? memory.array(dtype, {num_local, padded_rows, width})
               : memory.array(dtype, {buffer.capacity_rows(), width});
  };
  if (!combination.zero_copy) {
    staged_y_ = rows_array(dtype_, hidden);
    for (Round& round : rounds_) round.y = staged_y_;
  }
  if (combination.placement == Placement::kSlotted) {
    recv_x_ = rows_array(value_dtype(combination.format), hidden);
    if (is_fp8(combination.format)) {
      recv_scales_ =
          rows_array(combination.format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32,
                     num_scales(combination.format, problem.hidden));
    }
  }
  dispatch_options_ = {.format = combination.format,
                       .placement = combination.placement,
                       .layout = combination.layout,
                       .max_tokens = problem.max_tokens,
                       .return_hook = combination.hook,
                       .topk_weights = problem.partial_sums ? weights_ : TensorView(),
                       .recv_x = recv_x_,
                       .recv_scales = recv_scales_,
                       .stream = memory.stream()};
}

void Operation::dispatch(int round) {
  rounds_[round].received =
      buffer_.dispatch(x_, round == 0 ? wide_indices_ : narrow_indices_, dispatch_options_);
}

void Operation::take_combine_buffer(int round) {
  if (!combination_.zero_copy) return;
  rounds_[round].y = buffer_.next_combine_buffer(rounds_[round].received.handle, dtype_);
  combine_buffer_taken_ = true;
}

void Operation::combine(int round) {
  const ConstTensorView weights =
      dispatch_options_.topk_weights.has_value() ? ConstTensorView() : weights_;
  combine_hook_ = buffer_.combine(rounds_[round].y, weights, rounds_[round].received.handle, out_,
                                  {.return_hook = combination_.hook, .stream = memory_.stream()});
}

void Operation::settle() {
  memory_.synchronise();
  buffer_.check();
}

}  // namespace tandem::tools
