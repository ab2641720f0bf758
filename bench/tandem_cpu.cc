// Tandem in the CPU benchmark: ranks as processes that the library forks, or, with --area, that
// others start with their rank in the environment, one thread each; packed
// placement, packed layout, zero-copy combine. With no more ranks than cores each rank is pinned to
// a core, as mpirun --bind-to core does for the baseline. Prints a line of JSON per case.
#include <optional>

#include "command_line.h"
#include "harness.h"
#include "tandem/tandem.h"
#include "workload.h"

namespace tandem::bench {
namespace {

class TandemExchange {
 public:
  TandemExchange(const Communicator& communicator, const Case& work, bool partial_sums)
      : work_(work),
        partial_sums_(partial_sums),
        rank_(communicator.rank()),
        input_(work, rank_),
        out_(input_.x.size()),
        buffer_(communicator, {.backend = Backend::kCpu,
                               .num_experts = work.num_experts,
                               .max_tokens = work.num_tokens,
                               .max_hidden = work.hidden,
                               .max_topk = work.topk,
                               .slotted_placement = false,
                               .padded_layout = false,
                               .capacity_rows = most_received_rows(work)}) {}

  void dispatch() {
    result_ = buffer_.dispatch(
        view_of(std::as_const(input_).x.data(), {work_.num_tokens, work_.hidden}),
        view_of(std::as_const(input_).topk_idx.data(), {work_.num_tokens, work_.topk}),
        {.format = work_.format,
         .placement = Placement::kPacked,
         .layout = Layout::kPacked,
         .topk_weights = partial_sums_ ? weights() : ConstTensorView()});
    // Where the experts write is part of what they are handed: asked for, and timed, here.
    y_ = buffer_.next_combine_buffer(result_.handle, DType::kBFloat16);
  }

  void experts() {
    const auto* counts = result_.counts.as<std::int32_t>();
    std::int64_t row = 0;
    for (int local = 0; local < work_.num_local(); ++local) {
      for (int i = 0; i < counts[local]; ++i, ++row) {
        apply_expert(work_, rank_ * work_.num_local() + local, values(row),
                     y_.as<bfloat16>() + row * y_.strides[0]);
      }
    }
  }

  void combine() {
    buffer_.combine(y_, partial_sums_ ? ConstTensorView() : weights(), result_.handle,
                    view_of(out_.data(), {work_.num_tokens, work_.hidden}));
  }

  void check() const {
    struct Row {
      const void* values;
      const void* scales;
      std::int32_t source_token;
    };
    check_received(work_, rank_, result_.counts.as<std::int32_t>(), [this](std::int64_t row) {
      const float* scales = is_fp8(work_.format)
                                ? result_.scales.as<float>() + row * result_.scales.strides[0]
                                : nullptr;
      return Row{values(row), scales, result_.source_tokens.as<std::int32_t>()[row]};
    });
    check_combined(work_, rank_, out_.data(), partial_sums_ ? 2 : 1);
  }

 private:
  [[nodiscard]] ConstTensorView weights() const {
    return view_of(input_.topk_weights.data(), {work_.num_tokens, work_.topk});
  }
  [[nodiscard]] const std::byte* values(std::int64_t row) const {
    return result_.x.as<std::byte>() + row * result_.x.strides[0] * size_of(result_.x.dtype);
  }

  Case work_;
  bool partial_sums_;
  int rank_;
  RankInput input_;
  std::vector<bfloat16> out_;
  Buffer buffer_;
  DispatchResult result_;
  TensorView y_;
};

void pin_to_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) {
    std::fprintf(stderr, "tandem_cpu: rank %d could not be pinned to a core\n", core);
  }
}

int run(int argc, char** argv) {
  Arguments arguments;
  int num_ranks = 2;
  CLI::App app("Tandem's dispatch and combine on CPU ranks");
  add_options(app, arguments);
  app.add_option("--ranks", num_ranks, "Ranks, each a process");
  bool pin = false;
  app.add_flag("--pin", pin, "Pin ranks to cores in turn also where they outnumber the cores");
  bool partial_sums = false;
  app.add_flag("--partial-sums", partial_sums, "Combine by partial sums");
  CLI11_PARSE(app, argc, argv);

  SharedArea* const area = map_area(arguments.area);
  const auto run_rank = [&](const Communicator& communicator) {
    const int rank = communicator.rank();
    const int size = communicator.size();
    if (pin || size <= num_cores()) pin_to_core(rank % num_cores());
    for (const Case& work : cases(arguments, size)) {
      TandemExchange exchange(communicator, work, partial_sums);
      const Contender contender{.dispatch = [&] { exchange.dispatch(); },
                                .experts = [&] { exchange.experts(); },
                                .combine = [&] { exchange.combine(); },
                                .check = [&] { exchange.check(); }};
      const Timings timings = measure(*area, rank, size, contender, arguments.seconds);
      if (rank == 0) print_result(work, timings);
    }
    return 0;
  };
  if (!arguments.area.empty()) return run_rank(Communicator::from_environment());

  const auto exits = run_processes(num_ranks, run_rank);
  int result = 0;
  for (std::size_t rank = 0; rank < exits.size(); ++rank) {
    if (exits[rank].exit_code == 0 && exits[rank].signal == 0) continue;
    std::fprintf(stderr, "tandem_cpu: rank %zu: exit code %d, signal %d. %s\n", rank,
                 exits[rank].exit_code, exits[rank].signal, exits[rank].error.c_str());
    result = 1;
  }
  return result;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) {
  try {
    return tandem::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tandem_cpu: %s\n", error.what());
    return 1;
  }
}
