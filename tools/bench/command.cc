#include "bench/command.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bench/options.h"
#include "bench/rank_bench.h"
#include "bench/routing.h"
#include "bench/summary.h"
#include "common/console.h"
#include "common/report.h"
#include "runtime/recorder.h"

namespace tandem::tools {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kSetupAllowance{60};
// Of the copy whose rate is the floor's: many times a cache, and as the figures to beat have it.
constexpr std::int64_t kCopiedBytes = std::int64_t{1} << 30;
constexpr std::int64_t kCopiedBytesOnCpu = std::int64_t{64} << 20;
// What the system and other programs may still take.
constexpr double kUsableMemory = 0.9;

// Lengths of recordings: a case whose pair should take longer than kLongPairUs has fewer operations
// in one, and all the runs of a recording should take about kRunsUs.
constexpr int kOperations = 100;
constexpr int kLongOperations = 20;  // at least so many, to be comparable
constexpr double kLongPairUs = 300;
constexpr double kRunsUs = 400e3;
constexpr int kFewestReplays = 20;
constexpr int kMostReplays = 100;
constexpr double kLeastPairUs = 20;  // of latencies, however few the bytes

struct Machine {
  runtime::DeviceSummary device;
  double copy_gbs = 0;
};

// On a rank of its own: a process that is to be forked must not have touched a GPU.
Machine look_at_machine(const BenchOptions& options) {
  const std::int64_t size = options.backend == Backend::kCpu ? kCopiedBytesOnCpu : kCopiedBytes;
  const std::vector<RankOutcome> outcomes = run_ranks(
      options.launch, 1, kSetupAllowance, [&](const Communicator&, const ReportFunction& report) {
        const auto recorder = runtime::make_recorder(options.backend, -1);
        const runtime::DeviceSummary device = recorder->device();
        report({{"name", device.name},
                {"num_devices", device.num_devices},
                {"num_sms", device.num_sms},
                {"free_bytes", device.free_bytes},
                {"copy_gbs", recorder->copy_gbs(size)}});
      });
  if (outcomes[0].reports.empty()) throw std::runtime_error(outcomes[0].error);
  const nlohmann::json& seen = outcomes[0].reports[0];
  return {.device = {.name = seen["name"],
                     .num_devices = seen["num_devices"],
                     .num_sms = seen["num_sms"],
                     .free_bytes = seen["free_bytes"]},
          .copy_gbs = seen["copy_gbs"]};
}

int ranks_per_device(const Machine& machine, int ranks) {
  return (ranks + machine.device.num_devices - 1) / machine.device.num_devices;
}

// What the ranks' devices copy together.
double copy_gbs(const Machine& machine, int ranks) {
  return machine.copy_gbs * std::min(ranks, machine.device.num_devices);
}

// The CUDA backend's own share (docs/performance.md): an equal part, in multiples of 8 from 16 on.
int share_of_sms(const Machine& machine, int ranks) {
  const int share = machine.device.num_sms / ranks_per_device(machine, ranks);
  return share >= 16 ? share / 8 * 8 : share;
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  const std::size_t program_end = std::min(text.find(' '), text.size());
  const std::size_t slash = text.rfind('/', program_end);
  return slash == std::string::npos ? text : text.substr(slash + 1);
}

std::string now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

// Times one case; null where it does not fit in memory, or went wrong.
nlohmann::json run_case(const BenchOptions& options, const Machine& machine, const BenchCase& work,
                        const RecordedRouting& recorded, Report& report, const Output& output) {
  const auto routing = make_routing(work, recorded, options.seed);
  const std::vector<std::int64_t> rows_of = rows_of_experts(work, routing);
  std::int64_t rows = 0;
  for (const std::int64_t count : rows_of) rows += count;
  const double expected_us =
      kLeastPairUs + 1.5 * floor_us(bytes_moved(work, rows).pair(), copy_gbs(machine, work.ranks));
  const int operations = options.operations > 0      ? options.operations
                         : expected_us > kLongPairUs ? kLongOperations
                                                     : kOperations;
  const int replays = options.replays > 0
                          ? options.replays
                          : std::clamp(static_cast<int>(kRunsUs / (expected_us * operations)),
                                       kFewestReplays, kMostReplays);
  SpinBarrier meeting(work.ranks);
  const BenchPlan plan{.work = work,
                       .backend = options.backend,
                       .launch = options.launch,
                       .timeout = options.timeout,
                       .operations = operations,
                       .replays = replays,
                       .routing = routing,
                       .rows_of_experts = rows_of,
                       .meeting = meeting};
  const std::int64_t needed =
      memory_bytes(plan) / work.ranks * ranks_per_device(machine, work.ranks);
  const auto usable =
      static_cast<std::int64_t>(kUsableMemory * static_cast<double>(machine.device.free_bytes));
  if (needed > usable) {
    output.print(fmt::format("{}: left out, needs {:.1f} GB, {:.1f} are free\n", describe(work),
                             static_cast<double>(needed) / 1e9,
                             static_cast<double>(machine.device.free_bytes) / 1e9));
    return {};
  }
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  const std::vector<RankOutcome> outcomes =
      run_ranks(options.launch, work.ranks, timeout + kSetupAllowance,
                [&](const Communicator& communicator, const ReportFunction& tell) {
                  run_bench_rank(plan, communicator, tell);
                });
  return bench_row(work, options.launch, rows, copy_gbs(machine, work.ranks), outcomes, report);
}

void run_bench(const BenchArguments& arguments, Report& report, const Output& output) {
  const BenchOptions options = resolve(arguments);
  const bool needs_routing =
      std::any_of(options.cases.begin(), options.cases.end(),
                  [](const BenchCase& work) { return work.routing == BenchRouting::kReal; });
  const RecordedRouting recorded = needs_routing ? read_routing(options.data) : RecordedRouting{};
  const Clock::time_point begin = Clock::now();
  const Machine machine = look_at_machine(options);
  report.extra = {{"device", machine.device.name},
                  {"num_devices", machine.device.num_devices},
                  {"date", now()},
                  {"command", command_line()},
                  {"copy_gbs", machine.copy_gbs}};
  output.print(fmt::format(
      "{}: a copy reads and writes {:.0f} GB/s\n"
      "Microseconds an operation, slowest rank, medians over runs; p99: of pairs; floor: of the "
      "pair's bytes at that rate\n{}",
      machine.device.name, machine.copy_gbs, bench_heading()));
  nlohmann::json rows = nlohmann::json::array();
  int done = 0;
  {
    Progress progress(static_cast<int>(options.cases.size()));
    for (BenchCase work : options.cases) {
      if (Clock::now() - begin > options.budget) break;
      if (work.sms_per_rank == 0) {
        work.sms_per_rank = share_of_sms(machine, work.ranks);
      }
      if (work.routing == BenchRouting::kReal) {
        work.experts = recorded.experts;
        work.topk = recorded.topk;
      }
      progress.update(done++, describe(work));
      nlohmann::json row = run_case(options, machine, work, recorded, report, output);
      if (row.is_null()) continue;
      output.print(bench_line(row));
      rows.push_back(std::move(row));
    }
  }
  const int left = static_cast<int>(options.cases.size()) - done;
  if (left > 0) {
    output.print(fmt::format("{} cases were not run: the budget of {} s is spent\n", left,
                             options.budget.count()));
  }
  report.extra["rows"] = std::move(rows);
}

}  // namespace

void add_bench(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "time dispatch and combine in recordings (CUDA: captured graphs) replayed many times");
  const auto arguments = std::make_shared<BenchArguments>();
  add_options(*command, *arguments);
  command->callback([arguments, &run] {
    run = [arguments] {
      return execute("bench", arguments->json, [&](Report& report, const Output& output) {
        run_bench(*arguments, report, output);
      });
    };
  });
}

}  // namespace tandem::tools
