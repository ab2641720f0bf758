#include "test_low_latency/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <limits>

#include "common/report.h"

namespace tandem::tools {

namespace {

// In an order that puts formats of one width side by side: their combinations share a buffer.
constexpr std::array kFormats = {Format::kBFloat16, Format::kFloat16,  Format::kFp8,
                                 Format::kFp8Pow2,  Format::kFp8Ue8m0, Format::kFloat32};
constexpr std::array kPlacements = {Placement::kPacked, Placement::kSlotted};
constexpr std::array kLayouts = {Layout::kPadded, Layout::kPacked};

// The values that a word stands for: one, or all of them.
template <typename T, std::size_t kSize>
std::vector<T> choose(const std::string& word, const std::array<T, kSize>& values) {
  if (word == "all") return {values.begin(), values.end()};
  for (const T value : values) {
    if (word == name(value)) return {value};
  }
  throw UsageError(fmt::format("'{}' is not among the choices", word));
}

std::vector<bool> choose_switch(const std::string& word) {
  if (word == "both") return {true, false};
  return {word == "on"};
}

// Few enough that something is left to dispatch.
int default_masked(const TestArguments& arguments) {
  const std::int64_t selections = std::int64_t{arguments.tokens} * arguments.topk;
  return static_cast<int>(std::min<std::int64_t>(10, selections / 4));
}

}  // namespace

void add_options(CLI::App& app, TestArguments& arguments) {
  constexpr int kMany = std::numeric_limits<int>::max();
  add_backend(app, arguments.backend, "where ranks compute");
  add_number(app, "--ranks", arguments.ranks, 1, kMaxRanks, "number of ranks");
  add_launch(app, arguments.where);
  add_number(app, "--tokens", arguments.tokens, 0, 1 << 24, "tokens of each rank");
  add_number(app, "--hidden", arguments.hidden, 1, kMaxHidden, "channels of a token");
  add_number(app, "--topk", arguments.topk, 1, kMaxTopk, "experts that a token selects");
  add_number(app, "--experts", arguments.experts, 1, 1 << 20, "experts over all ranks");
  add_choice(app, "--format", arguments.format,
             {"bf16", "fp16", "fp32", "fp8", "fp8-pow2", "fp8-ue8m0", "all"}, "dispatched rows");
  add_choice(app, "--placement", arguments.placement, {"packed", "slotted", "all"},
             "how a row finds its place");
  add_choice(app, "--layout", arguments.layout, {"padded", "packed", "all"},
             "what the experts are given");
  add_choice(app, "--zero-copy", arguments.zero_copy, {"on", "off", "both"},
             "experts write where peers read");
  add_choice(app, "--hook", arguments.hook, {"on", "off", "both"}, "split sending from receiving");
  app.add_flag("--uneven", arguments.uneven,
               "other numbers of tokens (0 among them) and experts on every rank");
  app.add_flag("--partial-sums", arguments.partial_sums,
               "weights go with tokens, ranks add up what their experts give (CPU ranks)");
  app.add_option("--masked", arguments.masked,
                 "selections of each rank set to -1\n(default: 10, at most a quarter of them)")
      ->check(CLI::Range(0, kMany))
      ->take_last();
  app.add_option("--iterations", arguments.iterations,
                 "timed iterations of each combination; 0: only check\n(default: up to 50, as fit "
                 "in half a second)")
      ->check(CLI::Range(0, 1'000'000'000))
      ->take_last();
  add_timeout(app, arguments.timeout_s);
  app.add_option("--seed", arguments.seed, "of routing and values")
      ->capture_default_str()
      ->take_last();
  add_number(app, "--pressure", arguments.pressure, 0, kMany,
             "further seeds, each run twice and compared by hashes");
  add_json(app, arguments.json);
}

std::string describe(const Combination& combination) {
  return fmt::format("{} {} {}{}{}", name(combination.format), name(combination.placement),
                     name(combination.layout), combination.zero_copy ? " zero-copy" : "",
                     combination.hook ? " hook" : "");
}

TestOptions resolve(const TestArguments& arguments) {
  if (arguments.placement == "packed" && arguments.hook == "on") {
    throw UsageError(
        "--placement packed and --hook on contradict each other: packed senders wait for the "
        "counts of their peers, and a send phase must not wait");
  }
  TestOptions options;
  options.backend = backend_of(arguments.backend);
  options.launch = launch_of(arguments.where.launch);
  options.hosts = arguments.where.hosts;
  options.shape = {.ranks = num_ranks(arguments.where, arguments.ranks),
                   .tokens = arguments.tokens,
                   .hidden = arguments.hidden,
                   .topk = arguments.topk,
                   .experts = arguments.experts,
                   .uneven = arguments.uneven,
                   .partial_sums = arguments.partial_sums,
                   .masked = arguments.masked >= 0 ? arguments.masked : default_masked(arguments),
                   .map_seed = arguments.seed};
  if (arguments.iterations >= 0) options.iterations = arguments.iterations;
  options.timeout = timeout_of(arguments.timeout_s);
  options.seed = arguments.seed;
  options.pressure = arguments.pressure;

  for (const Placement placement : choose(arguments.placement, kPlacements)) {
    for (const Layout layout : choose(arguments.layout, kLayouts)) {
      for (const Format format : choose(arguments.format, kFormats)) {
        for (const bool zero_copy : choose_switch(arguments.zero_copy)) {
          for (const bool hook : choose_switch(arguments.hook)) {
            if (hook && placement == Placement::kPacked) continue;
            options.combinations.push_back({format, placement, layout, zero_copy, hook});
          }
        }
      }
    }
  }
  return options;
}

}  // namespace tandem::tools
