#include "test_low_latency/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "test_low_latency/rank_run.h"
#include "test_low_latency/summary.h"

namespace tandem::tools {

namespace {

// Scenarios held at once: ranks go through them on one buffer.
constexpr std::int64_t kMaxScenarioBytes = std::int64_t{1} << 30;

// Set-up exchanges wait this much longer than operations do: a rank may have to sit out a peer's
// timeout, and to check its rows, before it comes.
constexpr std::chrono::seconds kSetupAllowance{60};

void run_test(const TestOptions& options, Report& report, const Output& output) {
  const Shape& shape = options.shape;
  const auto timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout) + kSetupAllowance;
  const std::int64_t bytes = std::max<std::int64_t>(scenario_bytes(shape, options.combinations), 1);
  const std::int64_t at_once = std::max<std::int64_t>(kMaxScenarioBytes / bytes, 1);

  // Seed after seed: the first is timed, those of --pressure follow.
  const std::int64_t num_seeds = std::int64_t{1} + options.pressure;
  for (std::int64_t first = 0; first < num_seeds; first += at_once) {
    std::vector<Scenario> scenarios;
    for (std::int64_t i = first; i < std::min(first + at_once, num_seeds); ++i) {
      scenarios.push_back(
          make_scenario(shape, options.seed + static_cast<std::uint64_t>(i), options.combinations));
    }
    const TestPlan plan{.options = options, .scenarios = scenarios, .timed = first == 0};
    const std::vector<RankOutcome> outcomes = run_ranks(
        options.launch, shape.ranks, timeout,
        [&](const Communicator& communicator, const ReportFunction& tell) {
          run_rank(plan, communicator, tell);
        },
        options.hosts);
    add_outcomes(options, outcomes, first == 0, report);
  }
  report.extra["pressure"] = options.pressure;
  report.extra["bandwidth_counts"] = kBandwidthNote;

  const std::string where =
      options.launch == Launch::kHosts   ? fmt::format("on {} hosts", options.hosts)
      : options.launch == Launch::kApart ? "as processes that share no memory"
                                         : fmt::format("as {}", name(options.launch));
  output.print(fmt::format("{} ranks {} ({}), {} tokens, hidden {}, top-{} of {} experts\n",
                           shape.ranks, where, name(options.backend), shape.tokens, shape.hidden,
                           shape.topk, shape.experts));
  output.print(table_of(report));
  if (options.iterations != 0) output.print(fmt::format("{}\n", kBandwidthNote));
}

}  // namespace

void add_test_low_latency(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "test-low-latency", "check and time every way to run dispatch and combine on random routing");
  const auto arguments = std::make_shared<TestArguments>();
  add_options(*command, *arguments);
  command->callback([arguments, &run] {
    run = [arguments] {
      const TestOptions options = resolve(*arguments);
      return execute(
          "test-low-latency", arguments->json,
          [&](Report& report, const Output& output) { run_test(options, report, output); });
    };
  });
}

}  // namespace tandem::tools
