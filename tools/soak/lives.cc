#include "soak/lives.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <optional>
#include <thread>

#include "common/memory.h"
#include "runtime/recorder.h"
#include "soak/holdings.h"
#include "soak/session.h"

namespace tandem::tools {

namespace {

class Lives {
 public:
  Lives(const SessionPlan& plan, Ledger& ledger, int rank, const ReportFunction& report)
      : plan_(plan),
        ledger_(ledger),
        rank_(rank),
        self_(ledger.ranks[rank]),
        report_(report),
        is_process_(are_processes(plan.options.launch)) {}

  // One of them; `all`: who begins together with this rank, null where it joins.
  void live(const Communicator* all) {
    runtime::use_device(plan_.options.backend, rank_);
    // What a backend keeps for as long as the process lives (a CUDA context) is there before.
    Memory(plan_.options.backend).synchronise();
    const Holdings before = holdings();
    try {
      self_.must_leave = false;
      self_.process = getpid();
      self_.dead = false;
      if (all != nullptr) {
        const BufferOptions options =
            plan_.meeting != nullptr ? plan_.meeting->with_door(plan_.buffer, rank_) : plan_.buffer;
        Buffer buffer(*all, options);
        run_session(plan_, ledger_, buffer, 0, all, report_);
      } else if (std::optional<Buffer> buffer = join()) {
        ++ledger_.joined;
        run_session(plan_, ledger_, *buffer, self_.joins_at, nullptr, report_);
      }
    } catch (const Left&) {
    } catch (const std::exception& error) {
      fail(error.what());
    }
    self_.process = 0;
    if (is_process_) report_({{"before", before}, {"after", holdings()}});
  }

  // Each as a process of its own, from one without threads.
  void live_as_processes() {
    for (bool is_first = true; is_first || !ledger_.over; is_first = false) {
      const ProcessExit exit = run_processes(1, [&](const Communicator&) {
                                 if (is_first) {
                                   const Communicator all = plan_.meeting->connect(rank_);
                                   live(&all);
                                 } else {
                                   live(nullptr);
                                 }
                                 return 0;
                               }).front();
      if (exit.signal == SIGKILL && self_.dead) continue;
      if (exit.signal != 0) fail(fmt::format("its process was ended by signal {}", exit.signal));
      if (!exit.error.empty()) fail(exit.error);
      return;
    }
  }

  // In the process or thread that it was started as.
  void live_here(const Communicator& all) {
    live(&all);
    while (self_.dead && !ledger_.over) live(nullptr);
  }

 private:
  // Nothing if the session is over before it is let in.
  [[nodiscard]] std::optional<Buffer> join() const {
    while (!ledger_.over) {
      try {
        return plan_.meeting->join(rank_, plan_.buffer);
      } catch (const Error& error) {
        // The one before has not been masked yet, or nobody has let this one in; across hosts the
        // others may not have taken note of its end either.
        const bool is_taken =
            plan_.options.launch == Launch::kHosts && error.code() == ErrorCode::kOrder;
        if (error.code() != ErrorCode::kTimeout && !is_taken) throw;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return {};
  }

  void fail(const std::string& what) {
    ++ledger_.unexpected_errors;
    report_({{"failure", what}});
    ledger_.over = true;
  }

  const SessionPlan& plan_;
  Ledger& ledger_;
  int rank_;
  Ledger::Rank& self_;
  const ReportFunction& report_;
  bool is_process_;
};

}  // namespace

void run_lives(const SessionPlan& plan, Ledger& ledger, const Communicator& communicator,
               const ReportFunction& report) {
  Lives lives(plan, ledger, communicator.rank(), report);
  if (!plan.options.faults) {
    lives.live(&communicator);
  } else if (plan.options.ends_ranks() && are_processes(plan.options.launch)) {
    lives.live_as_processes();
  } else {
    lives.live_here(communicator);
  }
}

}  // namespace tandem::tools
