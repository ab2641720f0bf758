#include "soak/command.h"

#include <dirent.h>
#include <fmt/format.h>
#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>

#include "common/console.h"
#include "common/hash.h"
#include "common/report.h"
#include "soak/session.h"

namespace tandem::tools {

namespace {

using Clock = std::chrono::steady_clock;

// A world of ranks lives so long: long enough for ranks to be lost and to come back.
constexpr std::chrono::seconds kSession{10};
// What the allocator may keep of all that came and went; a buffer's block has more.
constexpr std::int64_t kAllowedGrowthBytes = std::int64_t{4} << 20;

// What this process holds.
struct Holdings {
  std::int64_t memory_bytes = 0;
  int descriptors = 0;
};

Holdings holdings() {
  malloc_trim(0);
  Holdings holdings;
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;  // the second: resident
  holdings.memory_bytes = pages * sysconf(_SC_PAGESIZE);
  if (DIR* const directory = opendir("/proc/self/fd")) {
    while (readdir(directory) != nullptr) ++holdings.descriptors;
    closedir(directory);
    holdings.descriptors -= 3;  // ".", ".." and the directory's own
  }
  return holdings;
}

void run_one_session(const SessionPlan& plan, Ledger& ledger, Report& report) {
  ledger.begin_session();
  const std::vector<RankOutcome> outcomes =
      run_ranks(plan.options.launch, plan.options.ranks, std::chrono::minutes(2),
                [&](const Communicator& communicator, const ReportFunction& tell) {
                  run_session(plan, ledger, communicator, tell);
                });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto note = [&](const std::string& message) {
      report.failures.push_back({.combination = fmt::format("session of seed {}", plan.seed),
                                 .rank = static_cast<int>(rank),
                                 .message = message});
    };
    for (const nlohmann::json& told : outcomes[rank].reports) note(told.at("failure"));
    if (!outcomes[rank].error.empty() && !ledger.ranks[rank].dead) {
      ++ledger.unexpected_errors;
      note(outcomes[rank].error);
    }
  }
}

void summarise(const SoakOptions& options, const Ledger& ledger, const Holdings& before,
               const Holdings& after, int sessions, Report& report, const Output& output) {
  report.checks = ledger.rows;
  report.extra = {
      {"seed", options.seed},
      {"ranks", options.ranks},
      {"launch", name(options.launch)},
      {"sessions", sessions},
      {"operations", ledger.operations.load()},
      {"rows", ledger.rows.load()},
      {"faults",
       {{"ended", ledger.ended.load()},
        {"stopped", ledger.stopped.load()},
        {"delayed", ledger.delayed.load()},
        {"returned", ledger.returned.load()}}},
      {"errors",
       {{"expected", ledger.expected_errors.load()},
        {"unexpected", ledger.unexpected_errors.load()}}},
      {"memory_bytes", {{"before", before.memory_bytes}, {"after", after.memory_bytes}}},
      {"descriptors", {{"before", before.descriptors}, {"after", after.descriptors}}}};
  if (after.descriptors != before.descriptors) {
    report.failures.push_back({.message = fmt::format("{} descriptors before, {} after",
                                                      before.descriptors, after.descriptors)});
  }
  if (after.memory_bytes > before.memory_bytes + kAllowedGrowthBytes) {
    report.failures.push_back({.message = fmt::format("{} bytes of memory before, {} after",
                                                      before.memory_bytes, after.memory_bytes)});
  }
  if (waitpid(-1, nullptr, WNOHANG) >= 0) {
    report.failures.push_back({.message = "a process is left behind"});
  }
  const std::int64_t faults = ledger.ended + ledger.stopped + ledger.delayed;
  output.print(fmt::format(
      "seed {}: {} operations, {} rows checked, {} faults ({} ended, {} stopped, {} delayed; {} "
      "let in again), {} errors expected, {} unexpected, memory {:.1f} -> {:.1f} MiB, descriptors "
      "{} -> {}\n",
      options.seed, ledger.operations.load(), ledger.rows.load(), faults, ledger.ended.load(),
      ledger.stopped.load(), ledger.delayed.load(), ledger.returned.load(),
      ledger.expected_errors.load(), ledger.unexpected_errors.load(),
      static_cast<double>(before.memory_bytes) / (1 << 20),
      static_cast<double>(after.memory_bytes) / (1 << 20), before.descriptors, after.descriptors));
}

void run_soak(const SoakOptions& options, Report& report, const Output& output) {
  // What arenas of threads that are gone keep would pass for a leak, or hide one.
  mallopt(M_ARENA_MAX, 1);
  const SharedLedger ledger;
  const auto start = Clock::now();
  const auto elapsed = [&] { return Clock::now() - start; };
  Progress progress(static_cast<int>(options.duration / std::chrono::seconds(1)));
  Holdings before;
  int sessions = 0;
  // At least two: what the first allocates for good is there before.
  for (; report.ok() && (sessions < 2 || elapsed() < options.duration); ++sessions) {
    const std::chrono::nanoseconds left = options.duration - elapsed();
    const std::chrono::nanoseconds length =
        sessions == 0 ? std::min<std::chrono::nanoseconds>(kSession, options.duration / 2)
                      : std::min<std::chrono::nanoseconds>(kSession, left);
    run_one_session(draw_session(options, mix(options.seed + static_cast<std::uint64_t>(sessions)),
                                 std::max(length, std::chrono::nanoseconds(0))),
                    *ledger, report);
    if (sessions == 0) before = holdings();
    progress.update(
        static_cast<int>(elapsed() / std::chrono::seconds(1)),
        fmt::format("s, {} operations, {} rows", ledger->operations.load(), ledger->rows.load()));
  }
  summarise(options, *ledger, before, holdings(), sessions, report, output);
}

}  // namespace

void add_soak(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "soak",
      "mix operations of every kind for minutes and check every row, also as ranks are lost");
  const auto arguments = std::make_shared<SoakArguments>();
  add_options(*command, *arguments);
  command->callback([arguments, &run] {
    run = [arguments] {
      const SoakOptions options = resolve(*arguments);
      return execute("soak", arguments->json, [&](Report& report, const Output& output) {
        run_soak(options, report, output);
      });
    };
  });
}

}  // namespace tandem::tools
