#include "bench/rank_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "common/hash.h"
#include "common/lockstep.h"
#include "common/memory.h"
#include "runtime/recorder.h"
#include "tandem/tandem.h"

namespace tandem::tools {

namespace {

constexpr int kUntimedRuns = 3;
constexpr int kSpins = 4096;

// Rows of a dispatch's result taken as [rows, H].
std::int64_t result_rows(const BenchPlan& plan, int num_local, std::int64_t capacity_rows) {
  return plan.work.layout == Layout::kPadded
             ? std::int64_t{num_local} * plan.work.ranks * plan.work.tokens
             : capacity_rows;
}

int most_local_experts(const BenchCase& work) {
  return (work.experts + work.ranks - 1) / work.ranks;
}

// First expert of a rank: contiguous, as even as possible.
std::int64_t first_expert(const BenchCase& work, int rank) {
  return std::int64_t{work.experts / work.ranks} * rank + std::min(rank, work.experts % work.ranks);
}

std::int64_t rows_of_rank(const BenchPlan& plan, int rank) {
  std::int64_t rows = 0;
  for (auto expert = first_expert(plan.work, rank); expert < first_expert(plan.work, rank + 1);
       ++expert) {
    rows += plan.rows_of_experts[static_cast<std::size_t>(expert)];
  }
  return rows;
}

// Everything that a rank needs; after construction nothing is allocated.
class Bench {
 public:
  Bench(const BenchPlan& plan, const Communicator& communicator)
      : plan_(plan),
        rank_(communicator.rank()),
        recorder_(runtime::make_recorder(plan.backend, -1)),
        buffer_(communicator, buffer_options(plan)) {
    const BenchCase& work = plan.work;
    const std::int64_t tokens = work.tokens;
    const std::int64_t rows =
        result_rows(plan, buffer_.num_local_experts(), buffer_.capacity_rows());
    x_ = Array(plan.backend, DType::kBFloat16, {tokens, work.hidden});
    topk_idx_ = Array(plan.backend, DType::kInt64, {tokens, work.topk});
    weights_ = Array(plan.backend, DType::kFloat32, {tokens, work.topk});
    out_ = Array(plan.backend, DType::kBFloat16, {tokens, work.hidden});
    if (work.placement == Placement::kSlotted) {
      recv_x_ = Array(plan.backend, value_dtype(work.format), {rows, work.hidden});
      if (is_fp8(work.format)) {
        const std::int64_t groups = (work.hidden + kFp8GroupSize - 1) / kFp8GroupSize;
        const bool packed_scales = work.format == Format::kFp8Ue8m0;
        recv_scales_ = Array(plan.backend, packed_scales ? DType::kInt32 : DType::kFloat32,
                             {rows, packed_scales ? (groups + 3) / 4 : groups});
      }
    }
    if (!work.zero_copy) y_ = Array(plan.backend, DType::kBFloat16, {rows, work.hidden});
    upload_inputs();
    if (!work.zero_copy) fill(y_);
  }

  [[nodiscard]] runtime::Recorder& recorder() { return *recorder_; }
  Buffer& buffer() { return buffer_; }

  DispatchResult dispatch() {
    return buffer_.dispatch(x_, topk_idx_,
                            {.format = plan_.work.format,
                             .placement = plan_.work.placement,
                             .layout = plan_.work.layout,
                             .recv_x = shaped(recv_x_),
                             .recv_scales = shaped(recv_scales_),
                             .stream = recorder_->stream()});
  }

  // What combine is to be given: zero-copy the view, else the tensor.
  TensorView outputs(const DispatchHandle& handle) {
    return plan_.work.zero_copy ? buffer_.next_combine_buffer(handle, DType::kBFloat16)
                                : shaped(y_);
  }

  void combine(const ConstTensorView& y, const DispatchHandle& handle) {
    buffer_.combine(y, weights_, handle, out_, {.stream = recorder_->stream()});
  }

  // Repeats the rows of x: data, where fresh memory may be zeros. Returns once it is done.
  void fill(const TensorView& rows) {
    const int dim = rows.num_dims - 2;
    const std::int64_t count = dim == 0 ? rows.shape[0] : rows.shape[0] * rows.shape[1];
    for (std::int64_t first = 0; first < count; first += plan_.work.tokens) {
      const std::int64_t some = std::min<std::int64_t>(plan_.work.tokens, count - first);
      copy(rows_of(rows, first, some), rows_of(x_.view(), 0, some), plan_.backend,
           recorder_->stream());
    }
  }

  // Throws unless the counts are what the routing says.
  void check_counts(const DispatchResult& result) {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(buffer_.num_local_experts()));
    if (counts.empty()) return;
    copy(view_of(counts.data(), {static_cast<std::int64_t>(counts.size())}), result.counts,
         plan_.backend, recorder_->stream());
    buffer_.check();
    const std::int64_t first = first_expert(plan_.work, rank_);
    for (std::size_t local = 0; local < counts.size(); ++local) {
      const std::int64_t expected = plan_.rows_of_experts[static_cast<std::size_t>(first) + local];
      if (counts[local] != expected) {
        throw std::runtime_error(fmt::format("local expert {} received {} rows, not {}", local,
                                             counts[local], expected));
      }
    }
  }

 private:
  void upload_inputs() {
    const BenchCase& work = plan_.work;
    const auto rank = static_cast<std::size_t>(rank_);
    std::vector<std::uint64_t> bits(static_cast<std::size_t>(x_.view().num_elements()) / 4 + 1);
    std::uint64_t state = mix(rank + 1);
    for (std::uint64_t& word : bits) {
      state += 0x9e3779b97f4a7c15U;
      // Four bf16 between 2^-7 and 2 of either sign.
      word = (mix(state) & 0x83ff83ff83ff83ffU) + 0x3c003c003c003c00U;
    }
    upload(x_, bits.data());
    upload(topk_idx_, plan_.routing[rank].data());
    const std::vector<float> weights(plan_.routing[rank].size(),
                                     1.0F / static_cast<float>(work.topk));
    upload(weights_, weights.data());
  }

  void upload(const TensorView& tensor, const void* host) {
    ConstTensorView source = tensor;  // arrays have no gaps
    source.data = host;
    copy(tensor, source, plan_.backend, recorder_->stream());
  }

  // [rows, width] in the shape of the layout; no tensor where the array is none.
  [[nodiscard]] TensorView shaped(const Array& array) const {
    const TensorView flat = array.view();
    if (!flat.has_value() || plan_.work.layout == Layout::kPacked) return flat;
    return {flat.data,
            flat.dtype,
            {buffer_.num_local_experts(), std::int64_t{plan_.work.ranks} * plan_.work.tokens,
             flat.shape[1]}};
  }

  const BenchPlan& plan_;
  int rank_;
  std::unique_ptr<runtime::Recorder> recorder_;
  Buffer buffer_;
  Array x_, topk_idx_, weights_, out_, recv_x_, recv_scales_, y_;
};

// Runs a recording again and again on all ranks. A rank that fails goes on meeting its peers.
nlohmann::json time_runs(const BenchPlan& plan, const Communicator& communicator, Bench& bench,
                         int recording, std::exception_ptr& failure) {
  std::vector<double> all;
  std::vector<double> after_first;
  const bool spins = plan.launch == Launch::kThreads;
  for (int run = -kUntimedRuns; run < plan.replays; ++run) {
    if (spins) {
      plan.meeting.wait();
    } else {
      communicator.barrier();
    }
    if (failure != nullptr) continue;
    try {
      bench.recorder().start(recording);
      const runtime::RunTime time = bench.recorder().finish();
      bench.buffer().check();
      if (run < 0) continue;
      all.push_back(time.all_us / plan.operations);
      after_first.push_back(time.after_first_us / std::max(1, plan.operations - 1));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  return {{"all", all}, {"after_first", after_first}};
}

}  // namespace

void SpinBarrier::wait() {
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);  // pairs with the acquire below
    return;
  }
  for (int spin = 0; generation_.load(std::memory_order_acquire) == generation; ++spin) {
    if (spin > kSpins) std::this_thread::yield();
  }
}

BufferOptions buffer_options(const BenchPlan& plan) {
  const BenchCase& work = plan.work;
  BufferOptions options{.backend = plan.backend,
                        .num_experts = work.experts,
                        .max_tokens = work.tokens,
                        .max_hidden = work.hidden,
                        .max_topk = work.topk,
                        .packed_placement = work.placement == Placement::kPacked,
                        .slotted_placement = work.placement == Placement::kSlotted,
                        .padded_layout = work.layout == Layout::kPadded,
                        .timeout = plan.timeout,
                        .num_sms = work.sms_per_rank};
  if (work.layout == Layout::kPacked) {
    for (int rank = 0; rank < work.ranks; ++rank) {
      options.capacity_rows = std::max(options.capacity_rows, rows_of_rank(plan, rank));
    }
    options.capacity_rows = std::max<std::int64_t>(options.capacity_rows, 1);
  }
  return options;
}

std::int64_t memory_bytes(const BenchPlan& plan) {
  const BenchCase& work = plan.work;
  const BufferOptions options = buffer_options(plan);
  const std::int64_t rows = result_rows(plan, most_local_experts(work), options.capacity_rows);
  const std::int64_t row_bytes = std::int64_t{work.hidden} * 2;
  std::int64_t each = Buffer::size_bytes(options, work.ranks) + 2 * work.tokens * row_bytes;
  if (work.placement == Placement::kSlotted) each += rows * row_bytes;
  if (!work.zero_copy) each += rows * row_bytes;
  return each * work.ranks;
}

void run_bench_rank(const BenchPlan& plan, const Communicator& communicator,
                    const ReportFunction& report) {
  runtime::use_device(plan.backend, communicator.rank());
  Lockstep steps(communicator);
  std::unique_ptr<Bench> bench;
  DispatchResult first;
  DispatchResult second;
  TensorView y;
  nlohmann::json times = nlohmann::json::object();
  const auto give_up = [&] {
    std::string text;
    for (const std::string& error : steps.take_errors()) text += error + "; ";
    if (!text.empty()) report({{"error", text}});
    bench.reset();
  };
  const auto timed = [&](const char* what, const std::function<void()>& operation) {
    int recording = 0;
    if (!steps.step(std::string("recording ") + what,
                    [&] { recording = bench->recorder().record(plan.operations, operation); })) {
      return false;
    }
    std::exception_ptr failure;
    times[what] = time_runs(plan, communicator, *bench, recording, failure);
    return steps.step(std::string("timing ") + what, [&] {
      if (failure != nullptr) std::rethrow_exception(failure);
    });
  };

  const bool well =
      steps.step("set-up", [&] { bench = std::make_unique<Bench>(plan, communicator); }) &&
      // One dispatch into each half, and data into both combine regions.
      steps.step("dispatch", [&] { first = bench->dispatch(); }) &&
      steps.step("dispatch", [&] { second = bench->dispatch(); }) &&
      steps.step("combine buffer", [&] { y = bench->outputs(first.handle); }) &&
      steps.step("filling the combine buffer", [&] { bench->fill(y); }) &&
      steps.step("combine", [&] { bench->combine(y, first.handle); }) &&
      steps.step("combine buffer", [&] { y = bench->outputs(second.handle); }) &&
      steps.step("filling the combine buffer", [&] { bench->fill(y); }) &&
      steps.step("combine", [&] { bench->combine(y, second.handle); }) &&
      steps.step("counts", [&] { bench->check_counts(second); }) &&
      timed("combine",
            [&] {
              if (plan.work.zero_copy) runtime::reserve_unwritten(second.handle);
              bench->combine(y, second.handle);
            }) &&
      timed("dispatch", [&] { first = bench->dispatch(); }) &&
      timed("pair",
            [&] {
              first = bench->dispatch();
              bench->combine(bench->outputs(first.handle), first.handle);
            }) &&
      steps.step("counts", [&] { bench->check_counts(first); });
  if (well) report(times);
  give_up();
  communicator.barrier();
}

}  // namespace tandem::tools
