#include "common/report.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "common/console.h"
#include "tandem/info.h"

namespace tandem::tools {

namespace {

// Enough to see the pattern; the JSON has them all.
constexpr std::size_t kMaxPrintedFailures = 20;

}  // namespace

nlohmann::json Report::to_json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const Failure& failure : failures) {
    nlohmann::json item = {{"message", failure.message}};
    if (!failure.combination.empty()) item["combination"] = failure.combination;
    if (failure.rank >= 0) item["rank"] = failure.rank;
    list.push_back(std::move(item));
  }
  nlohmann::json json = {{"command", command}, {"version", version()}, {"ok", ok()},
                         {"checks", checks},   {"failures", list},     {"results", results}};
  json.update(extra);
  return json;
}

std::string describe(const Failure& failure) {
  std::string text;
  if (!failure.combination.empty()) text += failure.combination + ": ";
  if (failure.rank >= 0) text += fmt::format("rank {}: ", failure.rank);
  return text + failure.message;
}

Output::Output(const std::string& json_path) : path_(json_path) {
  if (path_.empty() || path_ == "-") return;
  file_.open(path_);  // now, not after minutes of work
  if (!file_) throw UsageError(fmt::format("--json: cannot write '{}'", path_));
}

void Output::print(const std::string& text) const {
  if (path_ == "-") return;
  fmt::print("{}", text);
  std::fflush(stdout);
}

void Output::write(const nlohmann::json& json) {
  if (path_.empty()) return;
  // Messages may quote bytes of a damaged file: replace what is not UTF-8.
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  if (path_ == "-") {
    fmt::print("{}\n", text);
    if (std::fflush(stdout) != 0) throw std::runtime_error("--json: standard output is closed");
    return;
  }
  file_ << text << '\n';
  file_.close();
  if (!file_) throw std::runtime_error(fmt::format("--json: writing '{}' failed", path_));
}

int execute(const std::string& command, const std::string& json_path,
            const std::function<void(Report&, const Output&)>& body) {
  Output output(json_path);
  Report report{.command = command};
  try {
    body(report, output);
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& error) {
    report.failures.push_back({.message = error.what()});
  }
  for (std::size_t i = 0; i < report.failures.size() && i < kMaxPrintedFailures; ++i) {
    fmt::print(stderr, "{} {}\n", red("failed:", stderr), describe(report.failures[i]));
  }
  if (report.failures.size() > kMaxPrintedFailures) {
    fmt::print(stderr, "... and {} more failures\n", report.failures.size() - kMaxPrintedFailures);
  }
  output.write(report.to_json());
  if (report.checks > 0 || !report.ok()) {
    output.print(fmt::format("{}: {} checks, {} failures\n",
                             report.ok() ? green("ok", stdout) : red("FAILED", stdout),
                             report.checks, report.failures.size()));
  }
  return report.ok() ? kExitOk : kExitFailed;
}

}  // namespace tandem::tools
