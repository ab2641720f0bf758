#include "soak/command.h"

#include <fmt/format.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "common/console.h"
#include "common/hash.h"
#include "common/report.h"
#include "soak/holdings.h"
#include "soak/lives.h"

namespace tandem::tools {

namespace {

using Clock = std::chrono::steady_clock;

// A buffer lives so long: long enough for ranks to be lost and to come back, several times over.
constexpr std::chrono::seconds kSession{10};
// What CUDA keeps of the graphs and streams of a session that are gone: on an H200 35 to 50 KiB,
// all in calls of its driver by call stack; of this program's own allocations none.
constexpr std::int64_t kDriverBytes = 128 << 10;

// Pools of UCX, whose pages a rank that shares no memory takes as it first uses them: 2.3 MiB over
// UCX's shared memory, the same after 10 s as after 50.
constexpr std::int64_t kPoolBytes = 2 << 20;

// The life of a rank's process whose memory has grown most.
struct Growth {
  Holdings before;
  Holdings after;
};

// Takes note of what ranks that are processes held.
void take_note(const nlohmann::json& lives, Growth& most) {
  const Growth one{.before = lives.at("before"), .after = lives.at("after")};
  const auto growth = [](const Growth& of) {
    return of.after.memory_bytes - of.before.memory_bytes;
  };
  if (most.before.memory_bytes == 0 || growth(one) > growth(most)) most = one;
}

void run_one_session(SessionPlan plan, Ledger& ledger, Growth& most, Report& report) {
  std::optional<Meeting> meeting;
  Launch launch = plan.options.launch;
  if (plan.options.ends_ranks()) {
    meeting.emplace(plan.options, fmt::format("tandem soak {} {}", getpid(), plan.seed));
    plan.meeting = &*meeting;
    // Each life of a rank is a process that moves to its host by itself.
    if (launch == Launch::kHosts) launch = Launch::kProcesses;
  }
  ledger.begin_session();
  const std::vector<RankOutcome> outcomes = run_ranks(
      launch, plan.options.ranks, std::chrono::minutes(2),
      [&](const Communicator& communicator, const ReportFunction& tell) {
        run_lives(plan, ledger, communicator, tell);
      },
      plan.options.hosts);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const auto note = [&](const std::string& message) {
      if (message.empty()) return;
      report.failures.push_back({.combination = fmt::format("session of seed {}", plan.seed),
                                 .rank = static_cast<int>(rank),
                                 .message = message});
    };
    for (const nlohmann::json& told : outcomes[rank].reports) {
      if (told.contains("failure")) {
        note(told.at("failure"));
      } else {
        take_note(told, most);
        const bool shares_memory =
            plan.options.launch != Launch::kApart && plan.options.launch != Launch::kHosts;
        note(what_is_left(told.at("before"), told.at("after"), shares_memory ? 0 : kPoolBytes));
      }
    }
    if (!outcomes[rank].error.empty()) ++ledger.unexpected_errors;
    note(outcomes[rank].error);
  }
}

double mebibytes(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// `held`: by this process, after each session.
void summarise(const SoakOptions& options, const Ledger& ledger, const std::vector<Holdings>& held,
               const Growth& rank, Report& report, const Output& output) {
  const Growth command{.before = held.front(), .after = held.back()};
  report.checks = ledger.rows;
  report.extra = {
      {"seed", options.seed},
      {"ranks", options.ranks},
      {"launch", name(options.launch)},
      {"sessions", held.size()},
      {"operations", ledger.operations.load()},
      {"rows", ledger.rows.load()},
      {"replays", ledger.replays.load()},
      {"faults",
       {{"ended", ledger.ended.load()},
        {"stopped", ledger.stopped.load()},
        {"delayed", ledger.delayed.load()},
        {"returned", ledger.returned.load()},
        {"joined", ledger.joined.load()}}},
      {"errors",
       {{"expected", ledger.expected_errors.load()},
        {"unexpected", ledger.unexpected_errors.load()}}},
      {"held",
       {{"before", command.before}, {"after", command.after}, {"after_each_session", held}}}};
  const bool are_forked = are_processes(options.launch);
  if (are_forked) {
    report.extra["held_by_a_rank"] = {{"before", rank.before}, {"after", rank.after}};
  }
  const bool in_this_process = options.backend == Backend::kCuda && !are_forked;
  const std::int64_t allowed =
      in_this_process ? kDriverBytes * static_cast<std::int64_t>(held.size()) : 0;
  const std::string left = what_is_left(command.before, command.after, allowed);
  if (!left.empty()) report.failures.push_back({.message = left});
  if (waitpid(-1, nullptr, WNOHANG) >= 0) {
    report.failures.push_back({.message = "a process is left behind"});
  }
  const std::int64_t faults = ledger.ended + ledger.stopped + ledger.delayed;
  output.print(fmt::format(
      "seed {}: {} operations ({} recordings run), {} rows checked, {} faults ({} ended, {} "
      "stopped, {} delayed; {} "
      "let in again, {} of them in place of an ended one), {} errors expected, {} unexpected, "
      "memory "
      "{:.1f} -> {:.1f} MiB{}, descriptors {} -> {}\n",
      options.seed, ledger.operations.load(), ledger.replays.load(), ledger.rows.load(), faults,
      ledger.ended.load(), ledger.stopped.load(), ledger.delayed.load(), ledger.returned.load(),
      ledger.joined.load(), ledger.expected_errors.load(), ledger.unexpected_errors.load(),
      mebibytes(command.before.memory_bytes), mebibytes(command.after.memory_bytes),
      are_forked
          ? fmt::format(" (of the rank that grew most {:.1f} -> {:.1f})",
                        mebibytes(rank.before.memory_bytes), mebibytes(rank.after.memory_bytes))
          : "",
      command.before.descriptors, command.after.descriptors));
}

void run_soak(const SoakOptions& options, Report& report, const Output& output) {
  // What arenas of threads that are gone keep would pass for a leak, or hide one.
  mallopt(M_ARENA_MAX, 1);
  const SharedLedger ledger;
  const auto start = Clock::now();
  const auto elapsed = [&] { return Clock::now() - start; };
  Progress progress(static_cast<int>(options.duration / std::chrono::seconds(1)));
  std::vector<Holdings> held;
  Growth rank;
  // At least two: what the first allocates for good is there before.
  while (report.ok() && (held.size() < 2 || elapsed() < options.duration)) {
    const std::chrono::nanoseconds left = options.duration - elapsed();
    const std::chrono::nanoseconds length =
        held.empty() ? std::min<std::chrono::nanoseconds>(kSession, options.duration / 2)
                     : std::min<std::chrono::nanoseconds>(kSession, left);
    run_one_session(draw_session(options, mix(options.seed + held.size()),
                                 std::max(length, std::chrono::nanoseconds(0))),
                    *ledger, rank, report);
    held.push_back(holdings());
    progress.update(
        static_cast<int>(elapsed() / std::chrono::seconds(1)),
        fmt::format("s, {} operations, {} rows", ledger->operations.load(), ledger->rows.load()));
  }
  summarise(options, *ledger, held, rank, report, output);
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
