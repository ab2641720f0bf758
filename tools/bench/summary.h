// Rows of `tandem bench`: from what ranks reported to JSON and a line of the table.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/cases.h"
#include "common/launch.h"
#include "common/report.h"

namespace tandem::tools {

// The row of a case, with `rows` received over all ranks. A figure is of the slowest rank: the
// largest of all ranks' times of each run, then the median and the 99th percentile over the runs;
// `per_rank` has each rank's own median. Adds failures where a rank reported none.
nlohmann::json bench_row(const BenchCase& work, Launch launch, std::int64_t rows, double copy_gbs,
                         const std::vector<RankOutcome>& outcomes, Report& report);

std::string bench_heading();
std::string bench_line(const nlohmann::json& row);

}  // namespace tandem::tools
