// Times the test function: dispatch, simulated experts, combine, over and over on one problem.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "common/lockstep.h"
#include "test_low_latency/operation.h"

namespace tandem::tools {

// Of one rank, in microseconds, one entry per iteration. Send and receive only with a hook.
struct Samples {
  std::vector<double> dispatch, dispatch_send, dispatch_receive;
  std::vector<double> combine, combine_send, combine_receive;
};

// Ranks run free of each other, as they would in use: a rank that is early waits inside the
// operation. The experts touch nothing (y holds what the checked rounds left there), and taking the
// combine buffer counts as part of a zero-copy combine. On a GPU all ranks meet once each has
// launched, then wait for their streams: times include launching and the meeting.
class OperationTimer {
 public:
  // All must outlive it.
  OperationTimer(Lockstep& lockstep, const Memory& memory, const Combination& combination,
                 Operation& operation);

  // Runs a number of iterations, within a step of the lockstep.
  [[nodiscard]] Samples run(int iterations);

 private:
  void part(std::string_view what, const std::function<void()>& work);
  void run_once(Samples& samples);

  Lockstep& lockstep_;
  const Memory& memory_;
  Combination combination_;
  Operation& operation_;
};

// As many iterations as fit in a moment, when one takes so long.
int iterations_that_fit(double iteration_us);

}  // namespace tandem::tools
