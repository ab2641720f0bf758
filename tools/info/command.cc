#include "info/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "common/options.h"
#include "common/report.h"
#include "tandem/info.h"
#include "tandem/types.h"

namespace tandem::tools {

namespace {

using nlohmann::json;

json limits() {
  return {{"ranks", kMaxRanks},
          {"hidden", kMaxHidden},
          {"topk", kMaxTopk},
          {"fp8_group_channels", kFp8GroupSize}};
}

std::string state_of(const BackendInfo& backend) {
  if (backend.usable) return "usable";
  return fmt::format("{}: {}", backend.built ? "built, not usable here" : "not built",
                     backend.why_not);
}

void show_info(Report& report, const Output& output) {
  output.print(fmt::format("tandem {}\n", version()));
  json list = json::array();
  for (const BackendInfo& backend : backends()) {
    list.push_back({{"backend", name(backend.backend)},
                    {"built", backend.built},
                    {"usable", backend.usable},
                    {"why_not", backend.why_not},
                    {"details", backend.details}});
    output.print(fmt::format("backend {}: {}\n", name(backend.backend), state_of(backend)));
    for (const std::string& detail : backend.details) {
      output.print(fmt::format("  {}\n", detail));
    }
  }
  report.extra["backends"] = list;
  const NetworkInfo network = network_info();
  report.extra["network"] = {{"built", network.built},
                             {"library", network.library},
                             {"bears_turnover", network.bears_turnover}};
  output.print(fmt::format("network: {}\n", network.built ? network.library : "not built"));
  const json bounds = limits();
  report.extra["limits"] = bounds;
  output.print("limits:\n");
  for (const auto& [limit, value] : bounds.items()) {
    output.print(fmt::format("  {}: {}\n", limit, value.dump()));
  }
}

}  // namespace

void add_info(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand("info", "version, backends built and usable here, limits");
  const auto json_path = std::make_shared<std::string>();
  add_json(*command, *json_path);
  command->callback(
      [json_path, &run] { run = [json_path] { return execute("info", *json_path, show_info); }; });
}

}  // namespace tandem::tools
