#include "soak/menace.h"

#include <signal.h>

#include <random>

namespace tandem::tools {

Menace::Menace(const SessionPlan& plan, Ledger& ledger)
    : plan_(plan), ledger_(ledger), thread_([this] { act(); }) {}

Menace::~Menace() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

bool Menace::pause(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !stop_.wait_for(lock, duration, [this] { return stopping_; });
}

int Menace::num_alive() const {
  int alive = 0;
  for (int rank = 0; rank < plan_.options.ranks; ++rank) alive += ledger_.ranks[rank].dead ? 0 : 1;
  return alive;
}

// Two are always left; across hosts more than half, who alone can decide, though another be
// stopped.
int Menace::num_spared() const {
  return plan_.options.launch == Launch::kHosts ? plan_.options.ranks / 2 + 1 : 2;
}

void Menace::end(int rank, pid_t process) {
  Ledger::Rank& victim = ledger_.ranks[rank];
  victim.faulted = true;
  victim.dead = true;
  ++ledger_.ended;
  if (plan_.options.launch == Launch::kThreads) {
    victim.must_leave = true;
  } else {
    kill(process, SIGKILL);
  }
}

// Longer than anybody waits, or not.
void Menace::hold(int rank, pid_t process) {
  using std::chrono::milliseconds;
  Ledger::Rank& victim = ledger_.ranks[rank];
  std::minstd_rand random(static_cast<unsigned>(plan_.seed + ledger_.operations));
  const auto limit = std::chrono::duration_cast<milliseconds>(plan_.options.timeout);
  const milliseconds duration = limit / 4 + limit * static_cast<int>(random() % 8) / 4;
  victim.faulted = true;
  if (plan_.options.launch == Launch::kThreads) {
    ++ledger_.delayed;
    victim.nap_ms = static_cast<int>(duration.count());
    return;
  }
  ++ledger_.stopped;
  kill(process, SIGSTOP);
  pause(duration);
  kill(process, SIGCONT);
}

void Menace::act() {
  std::mt19937_64 random(plan_.seed);
  while (pause(std::chrono::milliseconds(50 + random() % 1500))) {
    const int rank =
        1 + static_cast<int>(random() % static_cast<unsigned>(plan_.options.ranks - 1));
    // Looked at once: a rank that is done says 0 from then on, and a signal to process 0 goes to
    // all of this program and of whoever started it.
    const pid_t process = ledger_.ranks[rank].process;
    if (ledger_.ranks[rank].dead || process == 0) continue;
    if (plan_.options.ends_ranks() && random() % 3 == 0 && num_alive() > num_spared()) {
      end(rank, process);
    } else {
      hold(rank, process);
    }
  }
}

}  // namespace tandem::tools
