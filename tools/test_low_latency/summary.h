// From the reports of all ranks to one result per combination: figures, failures, JSON, table.
#pragma once

#include <string>
#include <vector>

#include "common/launch.h"
#include "common/report.h"
#include "test_low_latency/rank_report.h"

namespace tandem::tools {

// What the bandwidth figures count, in a line.
extern const char* const kBandwidthNote;

// Adds checks and failures of all ranks to `report`. The first time (`with_results`) it adds one
// result per combination, later it adds the further seeds to these. A rank that died, and a
// combination that it did not report, are failures.
void add_outcomes(const TestOptions& options, const std::vector<RankOutcome>& outcomes,
                  bool with_results, Report& report);

// The results as a table for people.
std::string table_of(const Report& report);

}  // namespace tandem::tools
