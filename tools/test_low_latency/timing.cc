#include "test_low_latency/timing.h"

#include <algorithm>
#include <chrono>

namespace tandem::tools {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMomentUs = 500'000;  // that a combination is timed for, unless told otherwise
constexpr int kMostIterations = 50;
constexpr int kFewestIterations = 5;

double us_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

}  // namespace

OperationTimer::OperationTimer(Lockstep& lockstep, const Memory& memory,
                               const Combination& combination, Operation& operation)
    : lockstep_(lockstep), memory_(memory), combination_(combination), operation_(operation) {}

Samples OperationTimer::run(int iterations) {
  Samples samples;
  for (int i = 0; i < iterations; ++i) run_once(samples);
  return samples;
}

void OperationTimer::part(std::string_view what, const std::function<void()>& work) {
  if (memory_.backend() == Backend::kCpu) return work();
  lockstep_.substep(what, work);
  lockstep_.substep(what, [&] { operation_.settle(); });
}

void OperationTimer::run_once(Samples& samples) {
  const Clock::time_point start = Clock::now();
  part("timed dispatch", [&] { operation_.dispatch(0); });
  const Clock::time_point sent = Clock::now();
  if (combination_.hook) part("timed dispatch's hook", [&] { operation_.received(0).hook(); });
  const Clock::time_point received = Clock::now();
  part("timed combine", [&] {
    operation_.take_combine_buffer(0);
    operation_.combine(0);
  });
  const Clock::time_point returned = Clock::now();
  if (combination_.hook) part("timed combine's hook", [&] { operation_.combine_hook()(); });
  const Clock::time_point combined = Clock::now();

  samples.dispatch.push_back(us_between(start, received));
  samples.combine.push_back(us_between(received, combined));
  if (!combination_.hook) return;
  samples.dispatch_send.push_back(us_between(start, sent));
  samples.dispatch_receive.push_back(us_between(sent, received));
  samples.combine_send.push_back(us_between(received, returned));
  samples.combine_receive.push_back(us_between(returned, combined));
}

int iterations_that_fit(double iteration_us) {
  const double fitting = std::min(kMomentUs / iteration_us, double{kMostIterations});
  return std::max(static_cast<int>(fitting), kFewestIterations);
}

}  // namespace tandem::tools
