#include "run_layer/rank_layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "common/hash.h"
#include "common/lockstep.h"
#include "common/memory.h"
#include "run_layer/experts.h"
#include "runtime/recorder.h"
#include "tandem/buffer.h"

namespace tandem::tools {

namespace {

using Clock = std::chrono::steady_clock;

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Rows go out as bf16 and come back as float32: no error but that of the sums.
constexpr Format kFormat = Format::kBFloat16;
constexpr DType kCombineDType = DType::kFloat32;

BufferOptions buffer_options(const LayerPlan& plan) {
  const int num_tokens = plan.input.num_tokens;
  BufferOptions options;
  options.backend = plan.options.backend;
  options.num_experts = plan.weights.num_experts;
  options.max_tokens =
      std::max(first_token(num_tokens, plan.options.ranks, 1), 1);  // rank 0 has most
  options.max_hidden = plan.weights.hidden;
  options.max_topk = plan.input.topk;
  options.widest_format = Format::kFloat32;
  options.packed_placement = plan.options.placement == Placement::kPacked;
  options.slotted_placement = plan.options.placement == Placement::kSlotted;
  options.padded_layout = plan.options.layout == Layout::kPadded;
  options.timeout = plan.options.timeout;
  return options;
}

class RankLayer {
 public:
  RankLayer(const LayerPlan& plan, Buffer& buffer, const Memory& memory)
      : plan_(plan), buffer_(buffer), memory_(memory), hidden_(plan.weights.hidden) {
    const LayerInput& input = plan.input;
    first_ = first_token(input.num_tokens, buffer.num_ranks(), buffer.rank());
    num_tokens_ = first_token(input.num_tokens, buffer.num_ranks(), buffer.rank() + 1) - first_;
    x_ = memory.array_of(input.x.data() + size(first_) * size(hidden_), DType::kBFloat16,
                         {num_tokens_, hidden_});
    topk_idx_ = memory.array_of(input.topk_idx.data() + size(first_) * size(input.topk),
                                DType::kInt64, {num_tokens_, input.topk});
    topk_weights_ = memory.array_of(input.topk_weights.data() + size(first_) * size(input.topk),
                                    DType::kFloat32, {num_tokens_, input.topk});
    out_ = memory.array(kCombineDType, {num_tokens_, hidden_});
    for (const int id : buffer.local_experts()) experts_.emplace_back(plan.weights, id);

    const auto rows_array = [&](DType dtype) {
      return plan.options.layout == Layout::kPadded
                 ? memory.array(
                       dtype,
                       {buffer.num_local_experts(),
                        std::int64_t{buffer.num_ranks()} * buffer.options().max_tokens, hidden_})
                 : memory.array(dtype, {buffer.capacity_rows(), hidden_});
    };
    if (plan.options.placement == Placement::kSlotted) recv_x_ = rows_array(value_dtype(kFormat));
    if (!plan.options.zero_copy) {
      staged_y_ = rows_array(kCombineDType);
      y_ = staged_y_;
    }
    dispatch_options_ = {.format = kFormat,
                         .placement = plan.options.placement,
                         .layout = plan.options.layout,
                         .recv_x = recv_x_,
                         .stream = memory.stream()};
  }

  // The layer once. Ranks meet between its parts, so that each is timed without a wait for the part
  // before; false if a part failed somewhere.
  bool run(Lockstep& lockstep, RankLayerReport& report) {
    return timed(lockstep, "dispatch", report.dispatch_us,
                 [&] { received_ = buffer_.dispatch(x_, topk_idx_, dispatch_options_); }) &&
           lockstep.step("next_combine_buffer",
                         [&] {
                           if (!plan_.options.zero_copy) return;
                           y_ = buffer_.next_combine_buffer(received_.handle, kCombineDType);
                         }) &&
           timed(lockstep, "experts", report.experts_us, [&] { run_experts(); }) &&
           timed(lockstep, "combine", report.combine_us, [&] {
             buffer_.combine(y_, topk_weights_, received_.handle, out_,
                             {.stream = memory_.stream()});
           });
  }

  // What came out, against the file's y and the single process.
  void judge(RankLayerReport& report) const {
    const std::vector<int> ids = buffer_.local_experts();
    report.experts.assign(ids.begin(), ids.end());
    const auto counts = memory_.download<std::int32_t>(received_.counts);
    report.tokens_per_expert.assign(counts.begin(), counts.end());
    report.num_tokens = num_tokens_;
    report.timeout_s = std::chrono::duration<double>(buffer_.options().timeout).count();
    const auto out = memory_.download<float>(out_);
    const auto own = [&](const std::vector<float>& all) {
      return std::span(all).subspan(size(first_) * size(hidden_), out.size());
    };
    report.bitwise_equal = out.empty() || std::memcmp(out.data(), own(plan_.alone).data(),
                                                      out.size() * sizeof(float)) == 0;
    for (std::int64_t token = 0; token < num_tokens_; ++token) {
      const auto values = std::span(out).subspan(size(token) * size(hidden_), size(hidden_));
      Hasher hasher;
      const std::int64_t index = first_ + token;
      hasher.add_value(index);
      hasher.add(std::as_bytes(values));
      report.hash += hasher.value();
      if (plan_.input.y.empty()) continue;
      measure(values, own(plan_.input.y).subspan(size(token) * size(hidden_), size(hidden_)),
              report);
    }
  }

 private:
  bool timed(Lockstep& lockstep, std::string_view what, std::vector<double>& times,
             const std::function<void()>& work) {
    Clock::time_point start;
    double time_us = 0;
    const auto wait = [&] {
      memory_.synchronise();
      buffer_.check();
      time_us = us_since(start);
    };
    const bool on_cpu = memory_.backend() == Backend::kCpu;
    bool well = lockstep.step(what, [&] {
      start = Clock::now();
      work();
      if (on_cpu) wait();
    });
    // On a GPU all ranks must have launched before one waits.
    if (well && !on_cpu) well = lockstep.step(what, wait);
    times.push_back(time_us);
    return well;
  }

  void run_experts() {
    const auto counts = memory_.download<std::int32_t>(received_.counts);
    const auto offsets = memory_.download<std::int64_t>(received_.offsets);
    std::vector<bfloat16> x;
    std::vector<float> y;
    for (std::size_t local = 0; local < experts_.size(); ++local) {
      x.resize(size(counts[local]) * size(hidden_));
      y.resize(x.size());
      memory_.download(x.data(), rows_of<const void>(received_.x, offsets[local], counts[local]));
      experts_[local].run(x, y);
      memory_.upload(rows_of(y_, offsets[local], counts[local]), y.data());
    }
  }

  static void measure(std::span<const float> out, std::span<const float> y,
                      RankLayerReport& report) {
    double largest_error = 0;
    double largest_y = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double error = std::abs(double{out[i]} - double{y[i]});
      report.sum_abs_error += error;
      // A NaN is the largest error there is.
      largest_error = error <= largest_error ? largest_error : std::isnan(error) ? HUGE_VAL : error;
      largest_y = std::max(largest_y, std::abs(double{y[i]}));
    }
    report.max_abs_error = std::max(report.max_abs_error, largest_error);
    if (largest_error > 0) {
      report.max_relative_error = std::max(report.max_relative_error, largest_error / largest_y);
    }
  }

  const LayerPlan& plan_;
  Buffer& buffer_;
  const Memory& memory_;
  std::int64_t hidden_;
  std::int64_t first_ = 0;
  std::int64_t num_tokens_ = 0;
  Array x_, topk_idx_, topk_weights_, out_;
  Array recv_x_;    // slotted placement
  Array staged_y_;  // not zero-copy
  std::vector<Expert> experts_;
  DispatchOptions dispatch_options_;
  DispatchResult received_;
  TensorView y_;
};

}  // namespace

int first_token(int num_tokens, int num_ranks, int rank) {
  return num_tokens / num_ranks * rank + std::min(num_tokens % num_ranks, rank);
}

void run_rank(const LayerPlan& plan, const Communicator& communicator,
              const ReportFunction& report) {
  runtime::use_device(plan.options.backend, communicator.rank());
  Lockstep lockstep(communicator);
  RankLayerReport findings;
  std::optional<Memory> memory;
  std::optional<Buffer> buffer;
  std::optional<RankLayer> layer;
  const auto run = [&] {
    if (!lockstep.step("preparing the backend", [&] { memory.emplace(plan.options.backend); })) {
      return;
    }
    if (!lockstep.step("making the buffer",
                       [&] { buffer.emplace(communicator, buffer_options(plan)); })) {
      return;
    }
    if (!lockstep.step("making tensors", [&] { layer.emplace(plan, *buffer, *memory); })) return;
    RankLayerReport warm_up;
    if (!layer->run(lockstep, warm_up)) return;
    for (int i = 0; i < plan.options.iterations; ++i) {
      if (!layer->run(lockstep, findings)) return;
    }
    lockstep.step("reading the result", [&] { layer->judge(findings); });
  };
  run();
  lockstep.step("freeing tensors", [&] {
    layer.reset();
    buffer.reset();
  });
  findings.errors = lockstep.take_errors();
  report(findings);
}

}  // namespace tandem::tools
