// What one rank does: every combination on every scenario, checked twice and timed, in step with
// its peers.
#pragma once

#include <vector>

#include "common/launch.h"
#include "test_low_latency/expectation.h"

namespace tandem::tools {

// Scenarios share a shape and differ in their seeds. The first is timed, if any is.
struct TestPlan {
  const TestOptions& options;
  const std::vector<Scenario>& scenarios;
  bool timed = true;
};

// Reports {"begin": i} before and a RankReport after combination i. Throws where a peer is lost.
void run_rank(const TestPlan& plan, const Communicator& communicator, const ReportFunction& report);

}  // namespace tandem::tools
