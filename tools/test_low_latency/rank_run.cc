#include "test_low_latency/rank_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>

#include "common/console.h"
#include "common/lockstep.h"
#include "runtime/recorder.h"
#include "tandem/numeric.h"
#include "test_low_latency/check.h"
#include "test_low_latency/experts.h"
#include "test_low_latency/operation.h"
#include "test_low_latency/problem.h"
#include "test_low_latency/rank_report.h"
#include "test_low_latency/timing.h"

namespace tandem::tools {

namespace {

// All NaN, in every format.
constexpr std::byte kWiped{0xff};

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

// One combination on one scenario.
class CombinationRun {
 public:
  CombinationRun(const TestPlan& plan, const Memory& memory, Buffer& buffer, RankReport& report)
      : plan_(plan),
        memory_(memory),
        buffer_(buffer),
        combination_(plan.options.combinations[size(report.combination)]),
        report_(report) {}

  // False if a step failed somewhere: the buffer is not to be used again.
  bool run(const Scenario& scenario, bool timed, Lockstep& lockstep) {
    const Expectation& expectation = scenario.expectations.at(combination_.format);
    const Arrivals& arrivals = scenario.arrivals.at(combination_.layout);
    const auto rank = size(buffer_.rank());
    Tally tally;
    std::optional<Operation> operation;
    const auto steps = [&] {
      if (!lockstep.step("making tensors",
                         [&] { operation.emplace(buffer_, memory_, combination_, expectation); })) {
        return false;
      }
      std::array<RoundCheck, kNumRounds> checks = {
          RoundCheck(expectation, arrivals, buffer_.rank(), tally),
          RoundCheck(expectation, arrivals, buffer_.rank(), tally)};
      if (!run_rounds(arrivals[rank], checks, *operation, lockstep)) return false;
      const std::uint64_t hash = checks[0].hash();
      for (const RoundCheck& check : checks) {
        report_.max_abs_error = std::max(report_.max_abs_error, check.max_abs_error());
      }
      check_form(*operation, arrivals[rank], tally);
      if (report_.seeds == 0) report_.hash = hash;
      tally.check(hash == checks[1].hash(), "hashes", [&] {
        return fmt::format("seed {}: {:016x}, then {:016x} for the same problem", scenario.seed,
                           hash, checks[1].hash());
      });
      tally.check(hash == expectation.hashes[rank], "hashes", [&] {
        return fmt::format("seed {}: {:016x}, the oracle's is {:016x}", scenario.seed, hash,
                           expectation.hashes[rank]);
      });
      return !timed || time(*operation, lockstep);
    };
    const bool completed = steps();
    // Freeing memory may synchronise a device: when all ranks are done with theirs.
    const bool freed = lockstep.step("freeing tensors", [&] { operation.reset(); });
    report_.checks += tally.checks();
    for (const std::string& message : tally.messages()) {
      report_.failures.push_back(fmt::format("seed {}: {}", scenario.seed, message));
    }
    report_.bitwise_equal = report_.bitwise_equal && tally.passed() && completed;
    report_.seeds += completed ? 1 : 0;
    return completed && freed;
  }

 private:
  // The second dispatch before the first combine: so they take the two halves of the buffer.
  bool run_rounds(const reference::RankOutput& arrival, std::array<RoundCheck, kNumRounds>& checks,
                  Operation& operation, Lockstep& lockstep) {
    for (int round = 0; round < kNumRounds; ++round) {
      if (!lockstep.step("dispatch", [&] { operation.dispatch(round); })) return false;
      if (combination_.hook &&
          !lockstep.step("dispatch's hook", [&] { operation.received(round).hook(); })) {
        return false;
      }
      if (!lockstep.step("next_combine_buffer", [&] { operation.take_combine_buffer(round); }) ||
          !lockstep.step("reading received rows", [&] {
            check_and_compute(operation, round, arrival, checks[size(round)]);
          })) {
        return false;
      }
    }
    for (int round = 0; round < kNumRounds; ++round) {
      if (!lockstep.step("combine", [&] { operation.combine(round); })) return false;
      if (combination_.hook &&
          !lockstep.step("combine's hook", [&] { operation.combine_hook()(); })) {
        return false;
      }
      if (!lockstep.step("reading combined tokens",
                         [&] { read_combined(operation, checks[size(round)]); })) {
        return false;
      }
    }
    return true;
  }

  bool time(Operation& operation, Lockstep& lockstep) {
    OperationTimer timer(lockstep, memory_, combination_, operation);
    int iterations = plan_.options.iterations.value_or(-1);
    if (iterations < 0) {  // the slowest rank's time of one iteration decides for all
      double iteration_us = 0;
      if (!lockstep.step("warming up", [&] {
            const Samples samples = timer.run(1);
            iteration_us = samples.dispatch[0] + samples.combine[0];
          })) {
        return false;
      }
      iterations = iterations_that_fit(lockstep.largest(iteration_us));
    }
    return lockstep.step("timing", [&] {
      static_cast<void>(timer.run((2 * iterations + 4) / 5));  // warms up
      report_.samples = timer.run(iterations);
    });
  }

  // Downloads what came back, judges it and wipes it: the next round must write it anew.
  void read_combined(Operation& operation, RoundCheck& check) const {
    operation.settle();
    const TensorView out = operation.out();
    std::vector<std::byte> host(size(out.num_elements()) * size(size_of(out.dtype)));
    memory_.download(host.data(), out);
    check.combined(host);
    std::fill(host.begin(), host.end(), kWiped);
    memory_.upload(out, host.data());
  }

  // Downloads what arrived, judges it, gives each expert's rows to the simulated expert, and wipes
  // them: what a later dispatch leaves out must not look right.
  void check_and_compute(Operation& operation, int round, const reference::RankOutput& arrival,
                         RoundCheck& check) const {
    operation.settle();
    const DispatchResult& received = operation.received(round);
    check.metadata(memory_.download<std::int32_t>(received.counts),
                   memory_.download<std::int64_t>(received.offsets),
                   memory_.download<std::int64_t>(received.ranges));
    const Format format = combination_.format;
    const int hidden = plan_.options.shape.hidden;
    const std::size_t row_elements = size(hidden);
    const DType y_dtype = token_dtype(format);
    std::vector<std::byte> values, scales, y;
    std::vector<float> x;
    for (std::size_t local = 0; local < arrival.counts.size(); ++local) {
      const std::int64_t first = arrival.offsets[local];
      const std::int64_t count = arrival.counts[local];
      const std::size_t elements = size(count) * row_elements;
      values.resize(elements * size(size_of(value_dtype(format))));
      memory_.download(values.data(), rows_of<const void>(received.x, first, count));
      if (is_fp8(format)) {
        scales.resize(size(count) * size(num_scales(format, hidden)) * 4);
        memory_.download(scales.data(), rows_of<const void>(received.scales, first, count));
      }
      check.rows(
          static_cast<int>(local),
          memory_.download<std::int32_t>(rows_of<const void>(received.source_tokens, first, count)),
          values, scales);
      x.resize(elements);
      dequantise(format, hidden, values, scales, x);
      y.resize(elements * size(size_of(y_dtype)));
      apply_expert(arrival.experts[local], x, y_dtype, y);
      memory_.upload(rows_of(operation.y(round), first, count), y.data());
      std::fill(values.begin(), values.end(), kWiped);
      memory_.upload(rows_of(received.x, first, count), values.data());
      if (is_fp8(format)) {
        std::fill(scales.begin(), scales.end(), kWiped);
        memory_.upload(rows_of(received.scales, first, count), scales.data());
      }
    }
  }

  // Do the options show in what the operations gave back?
  void check_form(const Operation& operation, const reference::RankOutput& arrival, Tally& tally) {
    const DispatchResult& received = operation.received(1);
    Observed& seen = report_.observed;
    seen.process = getpid();
    seen.backend = name(buffer_.options().backend);
    seen.timeout_s = std::chrono::duration<double>(buffer_.options().timeout).count();
    seen.experts = buffer_.num_local_experts();
    seen.sent_tokens = operation.out().view().shape[0];
    seen.received_rows = 0;
    for (const std::int32_t count : arrival.counts) seen.received_rows += count;
    seen.value_dtype = name(received.x.dtype);
    seen.received_dims = received.x.num_dims;
    seen.into_callers_tensor =
        operation.recv_x().view().has_value() && received.x.data == operation.recv_x().view().data;
    seen.hook_returned = static_cast<bool>(operation.received(1).hook) &&
                         static_cast<bool>(operation.combine_hook());
    seen.combine_buffer_taken = operation.combine_buffer_taken();

    const auto expect = [&](bool passed, const char* what) {
      tally.check(passed, "form", [&] { return std::string(what); });
    };
    expect(received.x.dtype == value_dtype(combination_.format), "another dtype than the format's");
    expect(received.x.num_dims == (combination_.layout == Layout::kPadded ? 3 : 2),
           "the received tensor's dimensions are not the layout's");
    expect(received.x.shape[size(received.x.num_dims - 1)] == plan_.options.shape.hidden,
           "rows are not as wide as --hidden");
    expect(received.scales.has_value() == is_fp8(combination_.format),
           "scales without fp8, or fp8 without scales");
    expect(seen.into_callers_tensor == (combination_.placement == Placement::kSlotted),
           "rows are not where the placement puts them");
    expect(static_cast<bool>(operation.received(1).hook) == combination_.hook &&
               static_cast<bool>(operation.combine_hook()) == combination_.hook,
           "a hook that was not asked for, or none that was");
    expect(received.counts.data != operation.received(0).counts.data ||
               buffer_.num_local_experts() == 0,
           "the second dispatch did not take the other half");
    expect(buffer_.num_ranks() == plan_.options.shape.ranks, "another number of ranks");
    expect(buffer_.options().backend == plan_.options.backend, "another backend");
  }

  const TestPlan& plan_;
  const Memory& memory_;
  Buffer& buffer_;
  const Combination& combination_;
  RankReport& report_;
};

}  // namespace

void run_rank(const TestPlan& plan, const Communicator& communicator,
              const ReportFunction& report) {
  const std::vector<Combination>& combinations = plan.options.combinations;
  runtime::use_device(plan.options.backend, communicator.rank());
  Lockstep lockstep(communicator);
  std::optional<Memory> memory;
  std::optional<Buffer> buffer;
  std::optional<Progress> progress;  // one rank shows it for all
  if (communicator.rank() == 0) progress.emplace(static_cast<int>(combinations.size()));

  if (!lockstep.step("preparing the backend", [&] { memory.emplace(plan.options.backend); })) {
    throw std::runtime_error(fmt::format("{}", fmt::join(lockstep.take_errors(), "; ")));
  }
  for (std::size_t index = 0; index < combinations.size(); ++index) {
    const Combination& combination = combinations[index];
    report({{"begin", index}});
    if (progress) progress->update(static_cast<int>(index), describe(combination));
    RankReport findings{.combination = static_cast<int>(index)};

    const bool reusable =
        buffer.has_value() && index > 0 && share_buffer(combinations[index - 1], combination);
    bool usable = reusable;
    if (!reusable) {
      usable = lockstep.step("destroying the buffer", [&] { buffer.reset(); }) &&
               lockstep.step("making the buffer", [&] {
                 buffer.emplace(communicator,
                                buffer_options(plan.options, plan.scenarios.front(), combination));
               });
    }
    if (usable) {
      CombinationRun run(plan, *memory, *buffer, findings);
      for (std::size_t i = 0; i < plan.scenarios.size() && usable; ++i) {
        usable = run.run(plan.scenarios[i], plan.timed && i == 0, lockstep);
      }
    }
    if (!usable) {
      findings.bitwise_equal = false;
      lockstep.step("destroying a failed buffer", [&] { buffer.reset(); });
    }
    for (const std::string& error : lockstep.take_errors()) findings.failures.push_back(error);
    report(findings);
  }
  lockstep.step("destroying the buffer", [&] { buffer.reset(); });
}

}  // namespace tandem::tools
