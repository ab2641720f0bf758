// The `tandem` command: one subcommand per job, each in a folder of its own.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>

#include "bench/command.h"
#include "common/report.h"
#include "info/command.h"
#include "run_layer/command.h"
#include "soak/command.h"
#include "tandem/info.h"
#include "test_low_latency/command.h"

int main(int argc, char** argv) {
  using namespace tandem::tools;  // NOLINT: this file only ties them together
  // A hardware queue for each of up to 32 ranks that are threads on one GPU: in fewer, the
  // operations of two ranks may wait for each other. Read when CUDA starts, so that it must be said
  // before.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  CLI::App app{"Expert parallelism: tokens to their experts and back."};
  app.require_subcommand(1);
  app.set_version_flag("--version", tandem::version());
  std::function<int()> run;
  add_test_low_latency(app, run);
  add_run_layer(app, run);
  add_bench(app, run);
  add_soak(app, run);
  add_info(app, run);
  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;  // --help is an "error" with code 0
  } catch (const UsageError& error) {
    fmt::print(stderr, "tandem: {}\n", error.what());
    return kExitUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tandem: {}\n", error.what());
    return kExitFailed;
  }
}
