// Schedules of faults: ranks that end or are late, control words that are lost, come twice or come
// in another order. Whatever happens, nobody gets a wrong row, and in the end all who live run
// operations together again.
#pragma once

#include <chrono>
#include <vector>

#include "faults/script.h"
#include "support/scenario.h"

namespace tandem::test {

enum class Kind { kEnd, kStop, kLoseWord, kRepeatWord, kShuffleWords };

struct Fault {
  int rank;
  Kind kind;
  Point point;
  int nth;
  int peer;  // words
  std::chrono::microseconds pause;
};

struct Schedule {
  Shape shape;
  OnTimeout on_timeout = OnTimeout::kFail;
  std::vector<Fault> faults = {};
};

// Runs operations on all ranks, each judged by the oracle, until all who live have run some
// together.
void run_schedule(const Schedule& schedule);

// Schedules drawn at random, one after the other; each failure says its seed, and the environment's
// TANDEM_FAULT_SEED repeats one.
void run_drawn_schedules(std::chrono::seconds duration);

}  // namespace tandem::test
