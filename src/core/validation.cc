#include "core/validation.h"

#include <algorithm>
#include <limits>
#include <string>

#include "tandem/error.h"

namespace tandem::core {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require_range(const char* what, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    refuse(std::string(what) + " is " + std::to_string(value) + ", must be in [" +
           std::to_string(low) + ", " + std::to_string(high) + "]");
  }
}

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

std::string text(const std::array<std::int64_t, kMaxDims>& extents, int num_dims) {
  std::string result = "[";
  for (int dim = 0; dim < num_dims; ++dim) {
    result += (dim > 0 ? ", " : "") + std::to_string(extents[dim]);
  }
  return result + "]";
}

template <typename Void>
void require_shape(const char* what, const BasicTensorView<Void>& tensor,
                   std::initializer_list<std::int64_t> shape) {
  const bool same = tensor.num_dims == static_cast<int>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), tensor.shape.begin());
  if (same) return;
  std::array<std::int64_t, kMaxDims> wanted{};
  std::copy(shape.begin(), shape.end(), wanted.begin());
  refuse(std::string(what) + " has shape " + text(tensor.shape, tensor.num_dims) + ", must be " +
         text(wanted, static_cast<int>(shape.size())));
}

// Rows one after another or strided; the elements of a row adjacent; aligned to the element.
template <typename Void>
void require_rows(const char* what, const BasicTensorView<Void>& tensor) {
  if (tensor.num_elements() == 0) return;
  if (tensor.data == nullptr) refuse(std::string(what) + " has elements and a null pointer");
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.dtype) != 0) {
    refuse(std::string(what) + " is not aligned to its elements");
  }
  const int last = tensor.num_dims - 1;
  if (tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    refuse(std::string(what) + " has stride " + std::to_string(tensor.strides[last]) +
           " in its last dimension, must be 1");
  }
  if (last > 0 && tensor.shape[last - 1] > 1 && tensor.strides[last - 1] < tensor.shape[last]) {
    refuse(std::string(what) + " has rows " + std::to_string(tensor.strides[last - 1]) +
           " elements apart, must be at least " + std::to_string(tensor.shape[last]));
  }
}

// Without gaps.
template <typename Void>
void require_contiguous(const char* what, const BasicTensorView<Void>& tensor) {
  require_rows(what, tensor);
  if (tensor.num_elements() == 0) return;
  std::int64_t stride = 1;
  for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] > 1 && tensor.strides[dim] != stride) {
      refuse(std::string(what) + " has strides " + text(tensor.strides, tensor.num_dims) +
             ", must be row-major without gaps");
    }
    stride *= tensor.shape[dim];
  }
}

template <typename Void>
void require_dtype(const char* what, const BasicTensorView<Void>& tensor, DType dtype) {
  if (tensor.dtype != dtype) {
    refuse(std::string(what) + " is " + std::string(name(tensor.dtype)) + ", must be " +
           std::string(name(dtype)));
  }
}

void require_dims(const char* what, const ConstTensorView& tensor, int num_dims) {
  if (tensor.num_dims != num_dims) {
    refuse(std::string(what) + " has " + std::to_string(tensor.num_dims) +
           " dimensions, must have " + std::to_string(num_dims));
  }
}

void require_weights(const ConstTensorView& topk_weights, std::int64_t num_tokens,
                     std::int64_t topk) {
  require_shape("topk_weights", topk_weights, {num_tokens, topk});
  require_dtype("topk_weights", topk_weights, DType::kFloat32);
  require_contiguous("topk_weights", topk_weights);
}

bool fits_widest(DType dtype, const BufferOptions& buffer) {
  return size_of(dtype) <= size_of(value_dtype(buffer.widest_format));
}

std::string flag(bool value) { return value ? "true" : "false"; }

}  // namespace

void validate(const BufferOptions& options, int num_ranks) {
  require_range("num_ranks", num_ranks, 1, kMaxRanks);
  require_range("num_experts", options.num_experts, 1, 1 << 20);
  require_range("max_tokens", options.max_tokens, 1, 1 << 24);
  require_range("max_hidden", options.max_hidden, 1, kMaxHidden);
  require_range("max_topk", options.max_topk, 1, kMaxTopk);
  require_range("capacity_rows", options.capacity_rows, 0, kMaxInt32);
  require_range("num_threads", options.num_threads, 1, 1024);
  require_range("num_sms", options.num_sms, 0, 4096);
  if (options.timeout <= std::chrono::nanoseconds::zero()) {
    refuse("timeout is " + std::to_string(options.timeout.count()) +
           " ns, must be positive (BufferOptions::kForever for no limit)");
  }
  if (!options.expert_owners.empty() &&
      static_cast<int>(options.expert_owners.size()) != options.num_experts) {
    refuse("expert_owners has " + std::to_string(options.expert_owners.size()) +
           " entries, must have num_experts = " + std::to_string(options.num_experts) + " or none");
  }
  require_range("max_ranks", options.max_ranks, 0, kMaxRanks);
  const auto is_odd = [](unsigned char c) { return c < ' ' || c == 0x7f; };
  if (options.door.size() > 256 || std::any_of(options.door.begin(), options.door.end(), is_odd)) {
    refuse("door has " + std::to_string(options.door.size()) +
           " characters, must have at most 256 and no control characters");
  }
  if (options.door.empty() && !options.door_address.empty()) {
    refuse("door_address is '" + options.door_address + "', but door is empty: nobody may join");
  }
  if (!options.packed_placement && !options.slotted_placement) {
    refuse("packed_placement and slotted_placement are both false: nothing could be dispatched");
  }
}

ExpertMap make_expert_map(const BufferOptions& options, int num_ranks) {
  return options.expert_owners.empty() ? ExpertMap::contiguous(options.num_experts, num_ranks)
                                       : ExpertMap::from_owners(options.expert_owners, num_ranks);
}

layout::Capacity make_capacity(const BufferOptions& options, const ExpertMap& experts,
                               int num_arrival_words) {
  const std::int64_t all_tokens = std::int64_t{experts.num_ranks()} * options.max_tokens;
  const std::int64_t slotted_rows =
      experts.num_ranks() *
      rows_per_source(options.max_tokens, options.max_topk, experts.max_local());
  const std::int64_t worst = options.padded_layout
                                 ? std::max(slotted_rows, all_tokens * experts.max_local())
                                 : slotted_rows;
  const std::int64_t rows = options.capacity_rows > 0 ? options.capacity_rows : worst;
  require_range("capacity in rows", std::max(rows, slotted_rows), 1, kMaxInt32);
  const DType widest_combined =
      value_dtype(is_fp8(options.widest_format) ? Format::kBFloat16 : options.widest_format);
  return {
      .num_ranks = experts.num_ranks(),
      .num_experts = experts.num_experts(),
      .max_local_experts = experts.max_local(),
      .max_tokens = options.max_tokens,
      .max_topk = options.max_topk,
      .num_arrival_words = num_arrival_words,
      .dispatch_pitch = layout::max_dispatch_pitch(options.max_hidden, options.widest_format),
      .combine_pitch = layout::combine_pitch(options.max_hidden, widest_combined),
      .rows = rows,
      .view_rows = options.packed_placement ? rows : 0,
      .landing_rows = options.slotted_placement ? slotted_rows : 0,
      .combine_rows = options.combine ? rows : 0,
  };
}

std::vector<std::pair<std::string, std::string>> agreed_options(const BufferOptions& options) {
  std::vector<std::pair<std::string, std::string>> result{
      {"backend", std::string(name(options.backend))},
      {"num_experts", std::to_string(options.num_experts)},
      {"max_tokens", std::to_string(options.max_tokens)},
      {"max_hidden", std::to_string(options.max_hidden)},
      {"max_topk", std::to_string(options.max_topk)},
      {"widest_format", std::string(name(options.widest_format))},
      {"packed_placement", flag(options.packed_placement)},
      {"slotted_placement", flag(options.slotted_placement)},
      {"combine", flag(options.combine)},
      {"padded_layout", flag(options.padded_layout)},
      {"capacity_rows", std::to_string(options.capacity_rows)},
      {"on_timeout", std::string(name(options.on_timeout))},
      {"max_ranks", std::to_string(options.max_ranks)},
      {"door", options.door},
      {"first_epoch", std::to_string(options.first_epoch)},
      {"expert_owners.size()", std::to_string(options.expert_owners.size())},
  };
  for (std::size_t expert = 0; expert < options.expert_owners.size(); ++expert) {
    result.emplace_back("expert_owners[" + std::to_string(expert) + "]",
                        std::to_string(options.expert_owners[expert]));
  }
  return result;
}

void require_agreement(const std::vector<RankOptions>& all) {
  const RankOptions& first = all.front();
  for (const RankOptions& other : all) {
    const std::size_t common = std::min(first.options.size(), other.options.size());
    for (std::size_t i = 0; i < common; ++i) {
      if (first.options[i] == other.options[i]) continue;
      throw Error(
          ErrorInfo{.code = ErrorCode::kMismatch, .phase = Phase::kSetup, .peer = other.rank},
          "option " + first.options[i].first + " is " + first.options[i].second + " on rank " +
              std::to_string(first.rank) + " and " + other.options[i].second + " on rank " +
              std::to_string(other.rank) + ", must be the same on all ranks");
    }
  }
}

DispatchArguments validate_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                    const DispatchOptions& options, const BufferOptions& buffer,
                                    int num_local_experts, int num_ranks,
                                    const layout::Capacity& capacity) {
  require_dims("x", x, 2);
  require_dims("topk_idx", topk_idx, 2);
  DispatchArguments arguments;
  arguments.max_tokens = options.max_tokens == 0 ? buffer.max_tokens : options.max_tokens;
  require_range("max_tokens", arguments.max_tokens, 1, buffer.max_tokens);
  require_range("number of tokens (rows of x)", x.shape[0], 0, arguments.max_tokens);
  require_range("hidden size (columns of x)", x.shape[1], 1, buffer.max_hidden);
  require_range("top-k (columns of topk_idx)", topk_idx.shape[1], 1, buffer.max_topk);
  arguments.num_tokens = static_cast<std::int32_t>(x.shape[0]);
  arguments.topk = static_cast<std::int32_t>(topk_idx.shape[1]);
  require_shape("topk_idx", topk_idx, {x.shape[0], topk_idx.shape[1]});
  if (topk_idx.dtype != DType::kInt32 && topk_idx.dtype != DType::kInt64) {
    refuse("topk_idx is " + std::string(name(topk_idx.dtype)) + ", must be int32 or int64");
  }
  require_contiguous("topk_idx", topk_idx);
  if (options.topk_weights.has_value()) {
    if (buffer.backend != Backend::kCpu) {
      throw Error(ErrorCode::kUnsupported,
                  "topk_weights are given to a dispatch: ranks on GPUs have no partial sums");
    }
    if (!buffer.combine)
      refuse("topk_weights is given, and the buffer was made with combine = false");
    require_weights(options.topk_weights, arguments.num_tokens, arguments.topk);
  }

  const Format format = options.format;
  if (format > Format::kFp8Ue8m0) refuse("format is not one of the formats");
  if (is_fp8(format)) {
    if (!is_floating(x.dtype)) {
      refuse("x is " + std::string(name(x.dtype)) + ", must be bf16, fp16 or fp32");
    }
  } else {
    require_dtype("x", x, value_dtype(format));
    if (!fits_widest(value_dtype(format), buffer)) {
      refuse("format is " + std::string(name(format)) + ", wider than the buffer's widest_format " +
             std::string(name(buffer.widest_format)));
    }
  }
  require_rows("x", x);
  arguments.row = {static_cast<std::int32_t>(x.shape[1]), format};

  arguments.placement = options.placement;
  if (arguments.placement == Placement::kAutomatic) {
    arguments.placement = options.return_hook ? Placement::kSlotted : Placement::kPacked;
  }
  if (arguments.placement > Placement::kSlotted) refuse("placement is not one of the placements");
  if (options.layout > Layout::kPacked) refuse("layout is not one of the layouts");
  const bool packed = arguments.placement == Placement::kPacked;
  if (packed && options.return_hook) {
    refuse(
        "placement is packed and return_hook is true: a packed send waits for its peers; "
        "use slotted placement with a hook");
  }
  if (packed && !buffer.packed_placement) {
    refuse("placement is packed, and the buffer was made with packed_placement = false");
  }
  if (!packed && !buffer.slotted_placement) {
    refuse("placement is slotted, and the buffer was made with slotted_placement = false");
  }
  if (options.layout == Layout::kPadded && !buffer.padded_layout) {
    refuse("layout is padded, and the buffer was made with padded_layout = false");
  }
  require_range("row_alignment", options.row_alignment, 1, 1 << 20);
  require_range("num_sms", options.num_sms, 0, 4096);

  const bool padded = options.layout == Layout::kPadded;
  arguments.rows = {options.layout, num_local_experts,
                    padded ? std::int64_t{num_ranks} * arguments.max_tokens : capacity.rows};
  if (packed) {
    if (options.recv_x.has_value() || options.recv_scales.has_value()) {
      refuse("recv_x and recv_scales are for slotted placement; packed placement returns a view");
    }
    return arguments;
  }
  const auto require_output = [&](const char* what, const TensorView& given, DType dtype,
                                  std::int64_t width) {
    if (!given.has_value()) refuse(std::string(what) + " is required with slotted placement");
    require_dtype(what, given, dtype);
    if (padded) {
      require_shape(what, given, {num_local_experts, arguments.rows.rows_each, width});
    } else {
      require_shape(what, given, {arguments.rows.rows_each, width});
    }
    require_contiguous(what, given);
  };
  require_output("recv_x", options.recv_x, value_dtype(format), x.shape[1]);
  if (is_fp8(format)) {
    require_output("recv_scales", options.recv_scales,
                   format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32,
                   arguments.row.num_scales());
  } else if (options.recv_scales.has_value()) {
    refuse("recv_scales is given, and format " + std::string(name(format)) + " has no scales");
  }
  return arguments;
}

TensorView result_view(void* data, DType dtype, std::int64_t width, std::int64_t pitch_elements,
                       const ResultRows& rows) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  if (rows.layout == Layout::kPadded) {
    view.num_dims = 3;
    view.shape = {rows.num_local_experts, rows.rows_each, width};
    view.strides = {rows.rows_each * pitch_elements, pitch_elements, 1};
  } else {
    view.num_dims = 2;
    view.shape = {rows.rows_each, width, 0};
    view.strides = {pitch_elements, 1, 0};
  }
  return view;
}

void validate_combine_dtype(DType dtype, const BufferOptions& buffer) {
  if (!buffer.combine) refuse("the buffer was made with combine = false");
  if (!is_floating(dtype)) {
    refuse("dtype is " + std::string(name(dtype)) + ", must be bf16, fp16 or fp32");
  }
  const bool half_width = size_of(dtype) == 2;  // always allowed, like every fp8 dispatch's answer
  if (!half_width && !fits_widest(dtype, buffer)) {
    refuse("dtype is " + std::string(name(dtype)) + ", wider than the buffer's widest_format " +
           std::string(name(buffer.widest_format)));
  }
}

void validate_combine(const ConstTensorView& y, const ConstTensorView& topk_weights,
                      const TensorView& out, const CombineShape& shape,
                      const BufferOptions& buffer) {
  validate_combine_dtype(y.dtype, buffer);
  const bool padded = shape.rows.layout == Layout::kPadded;
  require_dims("y", y, padded ? 3 : 2);
  const std::int64_t hidden = y.shape[y.num_dims - 1];
  require_range("hidden size (last dimension of y)", hidden, 1, buffer.max_hidden);
  if (padded) {
    require_shape("y", y, {shape.rows.num_local_experts, shape.rows.rows_each, hidden});
    if (y.num_elements() > 0 && y.shape[0] > 1 && y.strides[0] != y.shape[1] * y.strides[1]) {
      refuse("y has strides " + text(y.strides, 3) + ", must be evenly spaced rows");
    }
  } else {
    require_shape("y", y, {shape.rows.rows_each, hidden});
  }
  require_rows("y", y);
  if (!shape.partial_sums) {
    require_weights(topk_weights, shape.num_tokens, shape.topk);
  } else if (topk_weights.has_value()) {
    refuse("topk_weights is given, and the dispatch had them; must be no tensor");
  }
  require_shape("out", out, {shape.num_tokens, hidden});
  require_dtype("out", out, y.dtype);
  require_rows("out", out);
}

void refuse_index(std::int64_t position, const ConstTensorView& topk_idx, int num_experts) {
  const std::int64_t value = topk_idx.dtype == DType::kInt32
                                 ? topk_idx.as<std::int32_t>()[position]
                                 : topk_idx.as<std::int64_t>()[position];
  refuse("topk_idx[" + std::to_string(position / topk_idx.shape[1]) + ", " +
         std::to_string(position % topk_idx.shape[1]) + "] is " + std::to_string(value) +
         ", must be below num_experts = " + std::to_string(num_experts));
}

void refuse_capacity(const Excess& excess, std::uint64_t epoch) {
  std::string message;
  if (excess.source >= 0) {
    message = "rank " + std::to_string(excess.source) + " has " + std::to_string(excess.rows) +
              " rows for rank " + std::to_string(excess.rank) +
              ", at most max_tokens * min(top-k, "
              "local experts) = " +
              std::to_string(excess.limit) + " fit";
  } else if (excess.expert >= 0) {
    message = "expert " + std::to_string(excess.expert) + " of rank " +
              std::to_string(excess.rank) + " would receive " + std::to_string(excess.rows) +
              " rows, the padded layout holds ranks * max_tokens = " + std::to_string(excess.limit);
  } else {
    message = "rank " + std::to_string(excess.rank) + " would need " + std::to_string(excess.rows) +
              " rows, the buffer's capacity is " + std::to_string(excess.limit);
  }
  throw Error(ErrorInfo{.code = ErrorCode::kCapacity,
                        .operation = Operation::kDispatch,
                        .epoch = epoch,
                        .peer = excess.rank,
                        .expected = excess.limit,
                        .seen = excess.rows},
              message + "; nothing was written");
}

}  // namespace tandem::core
