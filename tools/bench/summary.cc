#include "bench/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "common/statistics.h"

namespace tandem::tools {

namespace {

constexpr std::array kOperations = {"dispatch", "combine", "pair"};

// Nanoseconds are more than a clock tells.
double rounded(double us) { return std::round(us * 1e3) / 1e3; }

std::vector<double> slowest(const std::vector<RankOutcome>& outcomes, const char* operation,
                            const char* span) {
  std::vector<double> times;
  for (const RankOutcome& outcome : outcomes) {
    const auto own = outcome.reports.back()[operation][span].get<std::vector<double>>();
    times.resize(own.size());
    for (std::size_t run = 0; run < own.size(); ++run) times[run] = std::max(times[run], own[run]);
  }
  return times;
}

bool note_failures(const BenchCase& work, const std::vector<RankOutcome>& outcomes,
                   Report& report) {
  bool well = true;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    std::string text = outcome.error;
    for (const nlohmann::json& each : outcome.reports) {
      if (each.contains("error")) text += each["error"].get<std::string>();
    }
    if (outcome.reports.empty() || !outcome.reports.back().contains("pair")) well = false;
    if (text.empty()) continue;
    report.failures.push_back(
        {.combination = describe(work), .rank = static_cast<int>(rank), .message = text});
  }
  if (!well && report.failures.empty()) {
    report.failures.push_back({.combination = describe(work), .message = "no rank reported times"});
  }
  return well;
}

}  // namespace

nlohmann::json bench_row(const BenchCase& work, Launch launch, std::int64_t rows, double copy_gbs,
                         const std::vector<RankOutcome>& outcomes, Report& report) {
  ++report.checks;
  if (!note_failures(work, outcomes, report)) return {};
  const BenchBytes bytes = bytes_moved(work, rows);
  nlohmann::json row = {{"ranks", work.ranks},
                        {"sms_per_rank", work.sms_per_rank},
                        {"launch", name(launch)},
                        {"tokens", work.tokens},
                        {"hidden", work.hidden},
                        {"topk", work.topk},
                        {"experts", work.experts},
                        {"format", name(work.format)},
                        {"placement", name(work.placement)},
                        {"layout", name(work.layout)},
                        {"staging", work.zero_copy ? "zero-copy" : "staged"},
                        {"routing", name(work.routing)}};
  nlohmann::json steady = nlohmann::json::object();
  nlohmann::json per_rank = nlohmann::json::object();
  for (const char* operation : kOperations) {
    const std::string key = operation;
    const Quantiles times = quantiles(slowest(outcomes, operation, "all"));
    row[key + "_us"] = rounded(times.median);
    row[key + "_p99_us"] = rounded(times.p99);
    steady[key + "_us"] = rounded(quantiles(slowest(outcomes, operation, "after_first")).median);
    for (const RankOutcome& outcome : outcomes) {
      const auto own = outcome.reports.back()[operation]["all"].get<std::vector<double>>();
      per_rank[key + "_us"].push_back(rounded(quantiles(own).median));
    }
  }
  row["bytes"] = bytes.pair();
  row["floor_us"] = rounded(floor_us(bytes.pair(), copy_gbs));
  row["dispatch_floor_us"] = rounded(floor_us(bytes.dispatch, copy_gbs));
  row["combine_floor_us"] = rounded(floor_us(bytes.combine, copy_gbs));
  row["steady"] = steady;
  row["per_rank"] = per_rank;
  return row;
}

std::string bench_heading() {
  return fmt::format("{:>9} {:>5} {:<8} {:<8} {:<9} {:<8}{:>10}{:>10}{:>10}{:>10}{:>10}{:>8}\n",
                     "ranks", "T", "format", "rows", "combine", "routing", "dispatch", "combine",
                     "pair", "p99", "floor", "x floor");
}

std::string bench_line(const nlohmann::json& row) {
  const double pair = row["pair_us"];
  const double least = row["floor_us"];
  return fmt::format(
      "{:>9} {:>5} {:<8} {:<8} {:<9} {:<8}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.1f}{:>8.1f}\n",
      fmt::format("{} x {}", row["ranks"].get<int>(), row["sms_per_rank"].get<int>()),
      row["tokens"].get<int>(), row["format"].get<std::string>(),
      row["placement"].get<std::string>(), row["staging"].get<std::string>(),
      row["routing"].get<std::string>(), row["dispatch_us"].get<double>(),
      row["combine_us"].get<double>(), pair, row["pair_p99_us"].get<double>(), least, pair / least);
}

}  // namespace tandem::tools
