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

// Throws kMismatch naming the first option, rank and both values by which `all` (by rank) differ.
void require_agreement(std::span<const std::vector<std::pair<std::string, std::string>>> all);

// The validated facts of a dispatch, defaults resolved.
struct DispatchArguments {
  layout::RowShape row;
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  std::int32_t max_tokens = 0;
  Placement placement = Placement::kPacked;
};

DispatchArguments validate_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                    const DispatchOptions& options, const BufferOptions& buffer,
                                    int num_local_experts, int num_ranks,
                                    const layout::Capacity& capacity);

// Rows of the results of a dispatch taken as [rows, H].
std::int64_t result_rows(Layout layout, std::int32_t max_tokens, int num_local_experts,
                         int num_ranks, std::int64_t capacity_rows);

// A view of result rows in the shape of the layout: [L, R * M, width] or [rows, width].
TensorView result_view(void* data, DType dtype, std::int64_t width, std::int64_t pitch_elements,
                       Layout layout, int num_local_experts, std::int64_t rows);

// What combine is given, against what its dispatch was.
struct CombineShape {
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  Layout layout = Layout::kPadded;
  std::int64_t rows = 0;  // of y taken as [rows, H]
  int num_local_experts = 0;
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
