#include "run_layer/options.h"

#include <CLI/CLI.hpp>

namespace tandem::tools {

void add_options(CLI::App& app, LayerArguments& arguments) {
  app.add_option("file", arguments.file, "the layer's tensors")
      ->required()
      ->type_name("FILE.safetensors");
  add_backend(app, arguments.backend, "where dispatch and combine run");
  add_number(app, "--ranks", arguments.ranks, 1, kMaxRanks, "number of ranks");
  add_launch(app, arguments.where);
  add_choice(app, "--placement", arguments.placement, {"packed", "slotted"},
             "how a row finds its place");
  add_choice(app, "--layout", arguments.layout, {"padded", "packed"}, "what the experts are given");
  add_choice(app, "--zero-copy", arguments.zero_copy, {"on", "off"},
             "experts write where peers read");
  app.add_option("--routing", arguments.routings,
                 "run another of the file's routings too; may be repeated; all: every one")
      ->type_name("NAME");
  add_number(app, "--iterations", arguments.iterations, 1, 1'000'000, "timed runs of the layer");
  add_timeout(app, arguments.timeout_s);
  add_json(app, arguments.json);
}

LayerOptions resolve(const LayerArguments& arguments) {
  return {.backend = backend_of(arguments.backend),
          .ranks = num_ranks(arguments.where, arguments.ranks),
          .launch = launch_of(arguments.where.launch),
          .hosts = arguments.where.hosts,
          .placement = arguments.placement == "slotted" ? Placement::kSlotted : Placement::kPacked,
          .layout = arguments.layout == "padded" ? Layout::kPadded : Layout::kPacked,
          .zero_copy = arguments.zero_copy == "on",
          .iterations = arguments.iterations,
          .timeout = timeout_of(arguments.timeout_s)};
}

}  // namespace tandem::tools
