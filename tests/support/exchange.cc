#include "support/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "layout/row.h"

namespace tandem::test {
namespace {

constexpr std::byte kGuard{0xcd};

// A contiguous allocation of [rows, width], with the view's data null where it is empty: that is
// how frameworks hand over an empty tensor.
TensorView uploaded(Array& array, DType dtype, std::int64_t rows, std::int64_t width,
                    const std::byte* bytes, void* stream) {
  if (rows == 0) return TensorView(nullptr, dtype, {0, width});
  array = Array(backend_under_test(), dtype, {rows, width});
  upload(array.view(), bytes, stream);
  return array.view();
}

std::vector<std::byte> encode_indices(const std::vector<std::int64_t>& indices, DType dtype) {
  std::vector<std::byte> bytes(indices.size() * size_of(dtype));
  std::byte* out = bytes.data();
  for (const std::int64_t index : indices) {
    if (dtype == DType::kInt64) {
      std::memcpy(out, &index, sizeof(index));
    } else {
      const auto narrow = static_cast<std::int32_t>(index);
      std::memcpy(out, &narrow, sizeof(narrow));
    }
    out += size_of(dtype);
  }
  return bytes;
}

}  // namespace

GuardedTensor::GuardedTensor(DType dtype, std::int64_t num_rows, std::int64_t width,
                             std::int64_t gap, void* stream)
    : array_(backend_under_test(), dtype, {num_rows + 2, width + gap}),
      num_rows_(num_rows),
      width_(width) {
  poison(stream);
}

void GuardedTensor::poison(void* stream) const {
  const TensorView all = array_.view();
  if (!all.has_value()) return;
  const std::vector<std::byte> pattern(all.num_elements() * size_of(all.dtype), kGuard);
  upload(all, pattern.data(), stream);
}

TensorView GuardedTensor::view() const {
  TensorView view = array_.view();
  if (num_rows_ == 0) return TensorView(nullptr, view.dtype, {0, width_});
  view.data = view.as<std::byte>() + view.strides[0] * size_of(view.dtype);
  view.shape[0] = num_rows_;
  view.shape[1] = width_;
  return view;
}

TensorView GuardedTensor::view(std::int64_t outer, std::int64_t inner) const {
  const TensorView flat = view();
  TensorView view(flat.data, flat.dtype, {outer, inner, width_});
  view.strides[1] = flat.strides[0];
  view.strides[0] = flat.strides[0] * inner;
  return view;
}

bool GuardedTensor::guards_intact(void* stream) const {
  if (!array_.view().has_value()) return true;
  const std::vector<std::byte> bytes = download(array_.view(), stream);
  const std::int64_t pitch = array_.view().strides[0] * size_of(array_.view().dtype);
  const std::int64_t used = width_ * size_of(array_.view().dtype);
  for (std::int64_t row = 0; row < num_rows_ + 2; ++row) {
    const bool guard_row = row == 0 || row == num_rows_ + 1;
    const auto first = bytes.begin() + row * pitch;
    const auto is_guard = [](std::byte byte) { return byte == kGuard; };
    if (!std::all_of(first + (guard_row ? 0 : used), first + pitch, is_guard)) return false;
  }
  return true;
}

bool GuardedTensor::untouched(void* stream) const {
  const std::vector<std::byte> bytes = download(array_.view(), stream);
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte == kGuard; });
}

Exchange::Exchange(Rank& rank, const Scenario& scenario, const Buffer& buffer)
    : rank_(rank), scenario_(scenario), num_local_(buffer.num_local_experts()) {
  void* stream = rank.stream();
  const reference::RankInput& input = scenario.problem.ranks[rank.index()];
  const std::int64_t tokens = input.num_tokens;
  const std::int64_t hidden = shape().hidden;
  const DType x_dtype = scenario.problem.x_dtype;
  if (shape().row_gap > 0 && tokens > 0) {
    x_array_ = Array(backend_under_test(), x_dtype, {tokens, hidden + shape().row_gap});
    x_ = x_array_.view();
    x_.shape[1] = hidden;
    upload(x_, input.x.data(), stream);
  } else {
    x_ = uploaded(x_array_, x_dtype, tokens, hidden, input.x.data(), stream);
  }
  topk_idx_ = uploaded(idx_array_, shape().index_dtype, tokens, shape().topk,
                       encode_indices(input.topk_idx, shape().index_dtype).data(), stream);
  topk_weights_ = uploaded(weights_array_, DType::kFloat32, tokens, shape().topk,
                           reinterpret_cast<const std::byte*>(input.topk_weights.data()), stream);
  out_ = GuardedTensor(shape().combine_dtype, tokens, hidden, shape().row_gap, stream);

  const std::int64_t padded = std::int64_t{shape().num_ranks} * shape().max_tokens;
  const std::int64_t rows =
      shape().layout == Layout::kPadded ? num_local_ * padded : buffer.capacity_rows();
  if (slotted()) {
    const layout::RowShape row{shape().hidden, shape().format};
    recv_x_ = GuardedTensor(value_dtype(shape().format), rows, hidden, 0, stream);
    if (is_fp8(shape().format)) {
      const DType dtype = shape().format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32;
      recv_scales_ = GuardedTensor(dtype, rows, row.num_scales(), 0, stream);
    }
  }
  if (!shape().zero_copy) {
    std::vector<std::byte> y = scenario.y[rank.index()];
    y.resize(rows * hidden * size_of(shape().combine_dtype), std::byte{0xff});
    y_ = uploaded(y_array_, shape().combine_dtype, rows, hidden, y.data(), stream);
    if (shape().layout == Layout::kPadded) {
      y_ = TensorView(y_.data, y_.dtype, {num_local_, padded, hidden});
    }
  }
}

bool Exchange::slotted() const {
  return shape().placement == Placement::kSlotted ||
         (shape().placement == Placement::kAutomatic && shape().hook);
}

TensorView Exchange::received_view(const GuardedTensor& tensor) const {
  if (shape().layout == Layout::kPacked) return tensor.view();
  return tensor.view(num_local_, std::int64_t{shape().num_ranks} * shape().max_tokens);
}

void Exchange::note(const std::string& report, const char* step) {
  if (report.empty()) return;
  std::ostringstream text;
  text << step << ": " << report << "  in " << shape();
  rank_.fail(text.str());
}

TensorView Exchange::out() const { return out_.view(); }

DispatchOptions Exchange::dispatch_options() const {
  DispatchOptions options;
  options.format = shape().format;
  options.placement = shape().placement;
  options.layout = shape().layout;
  options.row_alignment = shape().row_alignment;
  options.max_tokens = shape().max_tokens;
  options.return_hook = shape().hook;
  options.stream = rank_.stream();
  if (shape().partial_sums) options.topk_weights = topk_weights_;
  if (slotted()) {
    options.recv_x = received_view(recv_x_);
    if (is_fp8(shape().format)) options.recv_scales = received_view(recv_scales_);
  }
  return options;
}

CombineOptions Exchange::combine_options() const {
  return {.return_hook = shape().hook, .stream = rank_.stream()};
}

void Exchange::dispatch(Buffer& buffer) {
  const DispatchOptions options = dispatch_options();
  recv_x_.poison(rank_.stream());
  recv_scales_.poison(rank_.stream());
  rank_.fence();
  result_ = buffer.dispatch(x_, topk_idx_, options);
  rank_.fence();
  rank_.expect(static_cast<bool>(result_.hook) == shape().hook, "a hook iff one was asked for");
}

void Exchange::finish_dispatch() {
  if (!shape().hook) return;
  rank_.fence();
  result_.hook();
  rank_.fence();
}

void Exchange::check_received() {
  note(compare_received(scenario_, rank_.index(), result_, rank_.stream()), "dispatch");
  rank_.expect(recv_x_.guards_intact(rank_.stream()), "guards around recv_x overwritten");
  rank_.expect(recv_scales_.guards_intact(rank_.stream()), "guards around recv_scales overwritten");
}

void Exchange::provide_outputs(Buffer& buffer) {
  if (!shape().zero_copy) {
    outputs_ = y_;
    return;
  }
  rank_.fence();
  outputs_ = buffer.next_combine_buffer(result_.handle, shape().combine_dtype);
  rank_.fence();
  const std::vector<std::byte>& y = scenario_.y[rank_.index()];
  TensorView rows = outputs_;
  if (shape().layout == Layout::kPacked) rows.shape[0] = scenario_.received[rank_.index()].num_rows;
  upload(rows, y.data(), rank_.stream());
}

void Exchange::combine(Buffer& buffer) {
  out_.poison(rank_.stream());
  rank_.fence();
  combine_hook_ = buffer.combine(outputs_, shape().partial_sums ? TensorView() : topk_weights_,
                                 result_.handle, out_.view(), combine_options());
  rank_.fence();
  rank_.expect(static_cast<bool>(combine_hook_) == shape().hook, "a hook iff one was asked for");
}

void Exchange::finish_combine() {
  if (!shape().hook) return;
  rank_.fence();
  combine_hook_();
  rank_.fence();
}

void Exchange::check_combined() {
  note(compare_combined(scenario_, rank_.index(), out_.view(), rank_.stream()), "combine");
  rank_.expect(out_.guards_intact(rank_.stream()), "guards around out overwritten");
}

void Exchange::run(Buffer& buffer) {
  dispatch(buffer);
  finish_dispatch();
  check_received();
  provide_outputs(buffer);
  combine(buffer);
  finish_combine();
  check_combined();
}

void run_scenario(const Scenario& scenario) {
  run_ranks(scenario.shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
  });
}

void run_in_turn(const std::vector<Shape>& shapes) {
  const BufferOptions options = options_for(shapes);
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  run_ranks(shapes.front().num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options);
    for (const Scenario& scenario : scenarios) {
      Exchange exchange(rank, scenario, buffer);
      exchange.run(buffer);
    }
  });
}

void run_scenario(const Shape& shape) { run_scenario(make_scenario(shape)); }

}  // namespace tandem::test
