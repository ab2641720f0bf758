// Refusal of wrong arguments, before anything is sent: each error names the argument, the value and
// the limit. And what follows from the options alone: the expert map and the capacities.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/expert_map.h"
#include "core/receive_plan.h"
#include "layout/block.h"
#include "tandem/buffer.h"

namespace tandem::core {

// Throws kInvalidArgument for an option out of range.
void validate(const BufferOptions& options, int num_ranks);

// The expert map that validated options ask for.
ExpertMap make_expert_map(const BufferOptions& options, int num_ranks);

// The capacities that validated options ask for. Throws kInvalidArgument where rows would outgrow
// the 31 bits of a row number.
layout::Capacity make_capacity(const BufferOptions& options, const ExpertMap& experts,
                               int num_arrival_words);

// The options that must agree on all ranks, as (name, value), in a fixed order.
std::vector<std::pair<std::string, std::string>> agreed_options(const BufferOptions& options);

// Those of one rank.
struct RankOptions {
  int rank = 0;
  std::vector<std::pair<std::string, std::string>> options;
};

// Throws kMismatch naming the first option by which a rank differs from the first of `all`, with
// both values.
void require_agreement(const std::vector<RankOptions>& all);

// How many rows the results of a dispatch have: `rows_each` for each local expert in the padded
// layout, in all in the packed one.
struct ResultRows {
  Layout layout = Layout::kPadded;
  int num_local_experts = 0;
  std::int64_t rows_each = 0;

  [[nodiscard]] std::int64_t total() const {
    return layout == Layout::kPadded ? num_local_experts * rows_each : rows_each;
  }
};

// The validated facts of a dispatch, defaults resolved.
struct DispatchArguments {
  layout::RowShape row;
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  std::int32_t max_tokens = 0;
  Placement placement = Placement::kPacked;
  ResultRows rows;
};

DispatchArguments validate_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                    const DispatchOptions& options, const BufferOptions& buffer,
                                    int num_local_experts, int num_ranks,
                                    const layout::Capacity& capacity);

// A view of result rows in the shape of the layout: [L, R * M, width] or [rows, width].
TensorView result_view(void* data, DType dtype, std::int64_t width, std::int64_t pitch_elements,
                       const ResultRows& rows);

// What combine is given, against what its dispatch was.
struct CombineShape {
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  ResultRows rows;
  bool partial_sums = false;
};

void validate_combine_dtype(DType dtype, const BufferOptions& buffer);
void validate_combine(const ConstTensorView& y, const ConstTensorView& topk_weights,
                      const TensorView& out, const CombineShape& shape,
                      const BufferOptions& buffer);

// The error of a selection whose expert does not exist.
[[noreturn]] void refuse_index(std::int64_t position, const ConstTensorView& topk_idx,
                               int num_experts);

// The error of a dispatch that does not fit.
[[noreturn]] void refuse_capacity(const Excess& excess, std::uint64_t epoch);

}  // namespace tandem::core
