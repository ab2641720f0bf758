#include "soak/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <random>

#include "common/report.h"
#include "soak/ledger.h"
#include "tandem/info.h"

namespace tandem::tools {

void add_options(CLI::App& app, SoakArguments& arguments) {
  add_backend(app, arguments.backend, "where ranks compute");
  add_launch(app, arguments.where);
  app.add_option("--minutes", arguments.minutes, "how long")
      ->check(CLI::Range(0.001, 100'000.0))
      ->capture_default_str()
      ->take_last();
  app.add_flag("--faults", arguments.faults,
               "ranks end (not if they are apart; on hosts with UCX 1.14 or later; on GPUs only "
               "processes of "
               "one host), are stopped or come late, and come back where they can");
  add_number(app, "--ranks", arguments.ranks, 1, kMaxSoakRanks, "number of ranks");
  app.add_option("--timeout", arguments.timeout_s,
                 "the longest any wait may take, in seconds\n(default: 30, with --faults 1)")
      ->check(CLI::Range(0.001, 1e6))
      ->take_last();
  app.add_option("--seed", arguments.seed,
                 "of everything that is drawn (default: another each time)")
      ->take_last();
  add_json(app, arguments.json);
}

SoakOptions resolve(const SoakArguments& arguments) {
  SoakOptions options{.backend = backend_of(arguments.backend),
                      .launch = launch_of(arguments.where.launch),
                      .hosts = arguments.where.hosts,
                      .duration = timeout_of(arguments.minutes * 60),
                      .faults = arguments.faults,
                      .ranks = num_ranks(arguments.where, arguments.ranks),
                      .timeout = timeout_of(arguments.timeout_s > 0 ? arguments.timeout_s
                                                                    : (arguments.faults ? 1 : 30)),
                      .seed = arguments.seed,
                      .network_bears_turnover = network_info().bears_turnover};
  if (options.ranks > kMaxSoakRanks) {
    throw UsageError(fmt::format("{} hosts with {} ranks each are more than {} ranks",
                                 arguments.where.hosts, arguments.where.ranks_per_host,
                                 kMaxSoakRanks));
  }
  if (options.faults && options.ranks < 3) {
    throw UsageError("--faults wants --ranks of at least 3: some are lost, and two are to be left");
  }
  if (options.seed == 0) options.seed = std::random_device{}();
  return options;
}

}  // namespace tandem::tools
