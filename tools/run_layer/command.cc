#include "run_layer/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "common/report.h"
#include "run_layer/experts.h"
#include "run_layer/summary.h"

namespace tandem::tools {

namespace {

// As for test-low-latency: a rank may have to sit out a peer's timeout and expert.
constexpr std::chrono::seconds kSetupAllowance{60};

std::vector<LayerInput> load_inputs(const Safetensors& file, const LayerWeights& weights,
                                    const std::vector<std::string>& routings) {
  std::vector<LayerInput> inputs = {load_input(file, weights)};
  for (const std::string& name : routings) {
    if (name != "all") {
      inputs.push_back(load_routing(file, weights, name));
      continue;
    }
    for (const std::string& each : routing_names(file)) {
      inputs.push_back(load_routing(file, weights, each));
    }
  }
  return inputs;
}

void run_layer(const LayerArguments& arguments, Report& report, const Output& output) {
  const LayerOptions options = resolve(arguments);
  const Safetensors file = Safetensors::read(arguments.file);
  const LayerWeights weights = load_weights(file);
  const auto timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout) + kSetupAllowance;
  for (const LayerInput& input : load_inputs(file, weights, arguments.routings)) {
    const std::vector<float> alone = run_alone(weights, input);
    const LayerPlan plan{.options = options, .weights = weights, .input = input, .alone = alone};
    const std::vector<RankOutcome> outcomes = run_ranks(
        options.launch, options.ranks, timeout,
        [&](const Communicator& communicator, const ReportFunction& tell) {
          run_rank(plan, communicator, tell);
        },
        options.hosts);
    add_layer_outcomes(plan, outcomes, report);
    output.print(text_of(report.results.back()));
  }
  const nlohmann::json& first = report.results.front();
  report.extra["layer"] = {{"max_abs_error", first["max_abs_error"]},
                           {"mean_abs_error", first["mean_abs_error"]},
                           {"tokens_per_expert", first["tokens_per_expert"]}};
}

}  // namespace

void add_run_layer(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand(
      "run-layer", "run a trained mixture-of-experts layer over ranks and check its result");
  const auto arguments = std::make_shared<LayerArguments>();
  add_options(*command, *arguments);
  command->callback([arguments, &run] {
    run = [arguments] {
      return execute("run-layer", arguments->json, [&](Report& report, const Output& output) {
        run_layer(*arguments, report, output);
      });
    };
  });
}

}  // namespace tandem::tools
