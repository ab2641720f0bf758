#include "run_layer/options.h"

#include <CLI/CLI.hpp>

namespace tandem::tools {

void add_options(CLI::App& app, LayerArguments& arguments) {
  const auto choice = [&](const std::string& option, std::string& target,
                          const std::vector<std::string>& words, const std::string& help) {
    app.add_option(option, target, help)
        ->check(CLI::IsMember(words))
        ->capture_default_str()
        ->take_last();
  };
  app.add_option("file", arguments.file, "the layer's tensors")
      ->required()
      ->type_name("FILE.safetensors");
  choice("--backend", arguments.backend, {"cpu", "cuda"}, "where dispatch and combine run");
  app.add_option("--ranks", arguments.ranks, "number of ranks")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str()
      ->take_last();
  choice("--launch", arguments.launch, {"threads", "processes"}, "what a rank is");
  choice("--placement", arguments.placement, {"packed", "slotted"}, "how a row finds its place");
  choice("--layout", arguments.layout, {"padded", "packed"}, "what the experts are given");
  choice("--zero-copy", arguments.zero_copy, {"on", "off"}, "experts write where peers read");
  app.add_option("--routing", arguments.routings,
                 "run another of the file's routings too; may be repeated; all: every one")
      ->type_name("NAME");
  app.add_option("--iterations", arguments.iterations, "timed runs of the layer")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str()
      ->take_last();
  app.add_option("--timeout", arguments.timeout_s, "the longest any wait may take, in seconds")
      ->check(CLI::Range(1e-9, 1e9))
      ->capture_default_str()
      ->take_last();
  app.add_option("--json", arguments.json, "write results there; -: standard output")
      ->type_name("FILE|-")
      ->take_last();
}

LayerOptions resolve(const LayerArguments& arguments) {
  return {
      .backend = arguments.backend == "cuda" ? Backend::kCuda : Backend::kCpu,
      .ranks = arguments.ranks,
      .launch = arguments.launch == "processes" ? Launch::kProcesses : Launch::kThreads,
      .placement = arguments.placement == "slotted" ? Placement::kSlotted : Placement::kPacked,
      .layout = arguments.layout == "padded" ? Layout::kPadded : Layout::kPacked,
      .zero_copy = arguments.zero_copy == "on",
      .iterations = arguments.iterations,
      .timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(arguments.timeout_s * 1e9))};
}

}  // namespace tandem::tools
