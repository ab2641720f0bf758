#include "test_low_latency/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "common/console.h"
#include "common/hash.h"
#include "common/statistics.h"
#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

const char* const kBandwidthNote =
    "GB/s (10^9 bytes): the payload of one rank, on average, over the slowest rank's median. "
    "Payload "
    "of dispatch: values and scales of the rows that a rank receives, its own among them; of "
    "combine: the expert outputs that a rank sums up. Indices, control words and padding do not "
    "count.";

namespace {

using nlohmann::json;

// Median and p99, each of the slowest rank; null without samples.
json slowest(const std::vector<RankReport>& reports, std::vector<double> Samples::*samples) {
  if (reports.empty()) return nullptr;
  Quantiles slowest;
  for (const RankReport& report : reports) {
    const std::vector<double>& own = report.samples.*samples;
    if (own.empty()) return nullptr;
    const Quantiles figures = quantiles(own);
    slowest.median = std::max(slowest.median, figures.median);
    slowest.p99 = std::max(slowest.p99, figures.p99);
  }
  return {{"median", slowest.median}, {"p99", slowest.p99}};
}

json observed(const std::vector<RankReport>& reports) {
  json all = json::object();
  std::set<std::int64_t> processes;
  std::vector<std::int64_t> sent, received, experts;
  for (const RankReport& report : reports) {
    processes.insert(report.observed.process);
    sent.push_back(report.observed.sent_tokens);
    received.push_back(report.observed.received_rows);
    experts.push_back(report.observed.experts);
  }
  if (!reports.empty()) all = reports.front().observed;
  for (const char* of_one_rank : {"process", "experts", "sent_tokens", "received_rows"}) {
    all.erase(of_one_rank);
  }
  all["processes"] = processes.size();
  all["sent_tokens"] = sent;
  all["received_rows"] = received;
  all["local_experts"] = experts;
  return all;
}

// The number for all ranks' results.
std::string joint_hash(const std::vector<RankReport>& reports) {
  Hasher hasher;
  for (const RankReport& report : reports) hasher.add_value(report.hash);
  return fmt::format("{:016x}", hasher.value());
}

json result_of(const TestOptions& options, const Combination& combination,
               const std::vector<RankReport>& reports) {
  const Shape& shape = options.shape;
  json result = {{"backend", name(options.backend)},
                 {"ranks", shape.ranks},
                 {"launch", name(options.launch)},
                 {"tokens", shape.tokens},
                 {"hidden", shape.hidden},
                 {"topk", shape.topk},
                 {"experts", shape.experts},
                 {"format", name(combination.format)},
                 {"placement", name(combination.placement)},
                 {"layout", name(combination.layout)},
                 {"zero_copy", combination.zero_copy},
                 {"hook", combination.hook},
                 {"uneven", shape.uneven},
                 {"masked", shape.masked},
                 {"seed", options.seed}};
  bool bitwise_equal = reports.size() == static_cast<std::size_t>(shape.ranks);
  double max_abs_error = 0;
  std::int64_t rows = 0;
  std::int64_t checks = 0;
  for (const RankReport& report : reports) {
    bitwise_equal = bitwise_equal && report.bitwise_equal;
    max_abs_error = std::max(max_abs_error, report.max_abs_error);
    rows += report.observed.received_rows;
    checks += report.checks;
  }
  result["checks"] = checks;
  result["max_abs_error"] = max_abs_error;
  result["bitwise_equal"] = bitwise_equal;
  result["hash"] = joint_hash(reports);
  result["seeds"] = reports.empty() ? 0 : reports.front().seeds;
  result["iterations"] = reports.empty() ? 0 : reports.front().samples.dispatch.size();
  result["dispatch_us"] = slowest(reports, &Samples::dispatch);
  result["combine_us"] = slowest(reports, &Samples::combine);
  if (combination.hook) {
    result["dispatch_send_us"] = slowest(reports, &Samples::dispatch_send);
    result["dispatch_receive_us"] = slowest(reports, &Samples::dispatch_receive);
    result["combine_send_us"] = slowest(reports, &Samples::combine_send);
    result["combine_receive_us"] = slowest(reports, &Samples::combine_receive);
  }

  // Each row is received once by dispatch and summed up once by combine.
  const std::int64_t value_bytes =
      std::int64_t{shape.hidden} * size_of(value_dtype(combination.format));
  const std::int64_t scale_bytes =
      combination.format == Format::kFp8Ue8m0
          ? (shape.hidden + kFp8GroupSize - 1) / kFp8GroupSize
          : std::int64_t{4} * num_scales(combination.format, shape.hidden);
  const std::int64_t dispatch_bytes = rows * (value_bytes + scale_bytes);
  const std::int64_t combine_bytes = rows * shape.hidden * size_of(token_dtype(combination.format));
  const auto bandwidth = [&](std::int64_t bytes, const json& time) -> json {
    if (time.is_null() || time["median"] <= 0) return nullptr;
    return static_cast<double>(bytes) / shape.ranks / time["median"].get<double>() / 1e3;
  };
  result["dispatch_bytes"] = dispatch_bytes;
  result["combine_bytes"] = combine_bytes;
  result["dispatch_gbs"] = bandwidth(dispatch_bytes, result["dispatch_us"]);
  result["combine_gbs"] = bandwidth(combine_bytes, result["combine_us"]);
  result["observed"] = observed(reports);
  return result;
}

std::string number(const json& value, const char* format) {
  return value.is_null() ? "-" : fmt::format(fmt::runtime(format), value.get<double>());
}

std::string on_off(const json& value) { return value.get<bool>() ? "on" : "off"; }

}  // namespace

void add_outcomes(const TestOptions& options, const std::vector<RankOutcome>& outcomes,
                  bool with_results, Report& report) {
  std::vector<std::vector<RankReport>> reports(options.combinations.size());
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    std::string current = "before the first combination";
    std::size_t finished = 0;
    for (const json& message : outcomes[rank].reports) {
      if (message.contains("begin")) {
        current = describe(options.combinations.at(message["begin"].get<std::size_t>()));
        continue;
      }
      RankReport findings = message.get<RankReport>();
      ++finished;
      report.checks += findings.checks;
      for (const std::string& failure : findings.failures) {
        report.failures.push_back({current, static_cast<int>(rank), failure});
      }
      reports.at(static_cast<std::size_t>(findings.combination)).push_back(std::move(findings));
    }
    if (!outcomes[rank].error.empty()) {
      report.failures.push_back({current, static_cast<int>(rank), outcomes[rank].error});
    } else if (finished != options.combinations.size()) {
      report.failures.push_back({current, static_cast<int>(rank), "ended without a result"});
    }
  }
  for (std::size_t index = 0; index < reports.size(); ++index) {
    const Combination& combination = options.combinations[index];
    // A rank that could not go on has told why; one that had to follow it may have nothing to tell.
    const bool failed_silently =
        std::any_of(reports[index].begin(), reports[index].end(),
                    [](const RankReport& one) { return !one.bitwise_equal; });
    if (failed_silently && report.ok()) {
      report.failures.push_back({describe(combination), -1, "the combination did not complete"});
    }
    json result = result_of(options, combination, reports[index]);
    if (with_results) {
      report.results.push_back(std::move(result));
      continue;
    }
    json& known = report.results.at(index);  // more seeds for a result that is there already
    known["seeds"] = known["seeds"].get<int>() + result["seeds"].get<int>();
    known["checks"] = known["checks"].get<std::int64_t>() + result["checks"].get<std::int64_t>();
    known["bitwise_equal"] =
        known["bitwise_equal"].get<bool>() && result["bitwise_equal"].get<bool>();
    known["max_abs_error"] =
        std::max(known["max_abs_error"].get<double>(), result["max_abs_error"].get<double>());
  }
}

std::string table_of(const Report& report) {
  const auto has_hook = [](const json& result) { return result["hook"].get<bool>(); };
  const bool hooked = std::any_of(report.results.begin(), report.results.end(), has_hook);
  std::vector<std::string> header = {"format", "placement", "layout", "zero-copy", "hook"};
  for (const char* operation : {"dispatch", "combine"}) {
    header.push_back(fmt::format("{} us", operation));
    header.emplace_back("p99");
    if (hooked) header.emplace_back("send+receive");
    header.emplace_back("GB/s");
  }
  header.emplace_back("result");
  Table table(header);
  for (const json& result : report.results) {
    std::vector<std::string> row = {result["format"], result["placement"], result["layout"],
                                    on_off(result["zero_copy"]), on_off(result["hook"])};
    for (const std::string operation : {"dispatch", "combine"}) {
      const json& time = result[operation + "_us"];
      const auto median = [&](const std::string& member) {
        const json& value = result[operation + member];
        return number(value.is_null() ? value : value["median"], "{:.1f}");
      };
      row.push_back(median("_us"));
      row.push_back(number(time.is_null() ? time : time["p99"], "{:.1f}"));
      if (hooked) {
        row.push_back(has_hook(result) && !time.is_null()
                          ? median("_send_us") + "+" + median("_receive_us")
                          : "-");
      }
      row.push_back(number(result[operation + "_gbs"], "{:.2f}"));
    }
    row.emplace_back(result["bitwise_equal"].get<bool>() ? "ok" : "FAILED");
    table.add(std::move(row));
  }
  return table.text();
}

}  // namespace tandem::tools
