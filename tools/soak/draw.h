// What a soak runs, drawn from its seed: alike on every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "soak/meeting.h"
#include "soak/options.h"
#include "tandem/buffer.h"
#include "test_low_latency/expectation.h"

namespace tandem::tools {

// One pair of operations.
struct SoakCase {
  Combination combination;
  Expectation inputs;    // only its problem
  int in_recording = 0;  // how many such pairs a recording of it has; 0: it has none
};

// The operations of one session: ranks with one buffer, made anew after some seconds with other
// experts and sizes.
struct SessionPlan {
  const SoakOptions& options;
  std::uint64_t seed;
  std::chrono::nanoseconds duration;
  std::vector<SoakCase> cases;  // as drawn by `at`, over and over
  BufferOptions buffer;
  const Meeting* meeting = nullptr;  // where ranks end and others join

  // The number of the case whose turn it is; and whether its recording is run, if it has one.
  [[nodiscard]] std::size_t at(std::int64_t pair) const;
  [[nodiscard]] bool replays(std::int64_t pair) const;
};

SessionPlan draw_session(const SoakOptions& options, std::uint64_t seed,
                         std::chrono::nanoseconds duration);

}  // namespace tandem::tools
