#include "bench/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "common/options.h"
#include "common/report.h"

namespace tandem::tools {

namespace {

// E and K of data/moe_layer.safetensors, whose routing the standard set replays.
constexpr int kRealExperts = 32;
constexpr int kRealTopk = 4;
// Up to here results are laid out as decoding wants them, [L, R * M, H]; beyond, without gaps.
constexpr int kMostPaddedTokens = 128;

// Lists of values to be combined.
struct Lists {
  std::vector<int> ranks = {2};
  std::vector<int> tokens = {128};
  std::vector<Format> formats = {Format::kBFloat16};
  std::vector<Placement> placements = {Placement::kPacked};
  std::vector<bool> zero_copy = {true};
  std::vector<BenchRouting> routings = {BenchRouting::kUniform};
};

Layout layout_of(const std::string& word, int tokens) {
  if (word == "padded") return Layout::kPadded;
  if (word == "packed") return Layout::kPacked;
  return tokens <= kMostPaddedTokens ? Layout::kPadded : Layout::kPacked;
}

void add_cases(const BenchArguments& arguments, const Lists& lists, std::vector<BenchCase>& cases) {
  for (const int ranks : lists.ranks) {
    for (const Format format : lists.formats) {
      for (const BenchRouting routing : lists.routings) {
        for (const Placement placement : lists.placements) {
          for (const bool zero_copy : lists.zero_copy) {
            for (const int tokens : lists.tokens) {
              const bool real = routing == BenchRouting::kReal;
              cases.push_back({.ranks = ranks,
                               .sms_per_rank = arguments.sms,
                               .tokens = tokens,
                               .hidden = arguments.hidden,
                               .topk = real ? kRealTopk : arguments.topk,
                               .experts = real ? kRealExperts : arguments.experts,
                               .format = format,
                               .placement = placement,
                               .zero_copy = zero_copy,
                               .routing = routing,
                               .layout = layout_of(arguments.layout, tokens)});
            }
          }
        }
      }
    }
  }
}

// Those whose figures are asked for most come first: a budget cuts the end.
std::vector<BenchCase> standard_cases(const BenchArguments& arguments) {
  std::vector<BenchCase> cases;
  const auto add = [&](const Lists& lists) { add_cases(arguments, lists, cases); };
  const std::vector<Format> formats = {Format::kBFloat16, Format::kFp8};
  if (arguments.backend == "cpu") {
    add({.ranks = {2, 8}, .tokens = {1, 8, 128}, .formats = formats});
    return cases;
  }
  add({.ranks = {2, 8}, .tokens = {1, 8, 32, 128}, .formats = formats});
  add({.ranks = {2, 8},
       .tokens = {1, 8, 32, 128},
       .placements = {Placement::kSlotted},
       .zero_copy = {false}});
  add({.ranks = {2, 8}, .tokens = {8, 128}, .routings = {BenchRouting::kHot, BenchRouting::kReal}});
  add({.ranks = {1, 4, 16}, .tokens = {1, 8, 32, 128}, .formats = formats});
  add({.ranks = {2, 8}, .zero_copy = {false}});
  add({.ranks = {2, 8}, .placements = {Placement::kSlotted}});
  add({.ranks = {2, 8},
       .formats = {Format::kFp8},
       .placements = {Placement::kSlotted},
       .zero_copy = {false}});
  add({.ranks = {1, 2, 4, 8, 16}, .tokens = {512, 4096}, .formats = formats});
  add({.ranks = {2, 8},
       .tokens = {512, 4096},
       .placements = {Placement::kSlotted},
       .zero_copy = {false}});
  add({.ranks = {2, 8}, .tokens = {4096}, .routings = {BenchRouting::kHot, BenchRouting::kReal}});
  return cases;
}

Format format_of(const std::string& word) {
  for (const Format format :
       {Format::kBFloat16, Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    if (word == name(format)) return format;
  }
  throw UsageError(fmt::format("'{}' is not among the formats", word));
}

std::vector<BenchCase> named_cases(const BenchArguments& arguments) {
  Lists lists;
  if (!arguments.ranks.empty()) lists.ranks = arguments.ranks;
  if (!arguments.tokens.empty()) lists.tokens = arguments.tokens;
  if (!arguments.formats.empty()) {
    lists.formats.clear();
    for (const std::string& word : arguments.formats) lists.formats.push_back(format_of(word));
  }
  if (!arguments.placements.empty()) {
    lists.placements.clear();
    for (const std::string& word : arguments.placements) {
      lists.placements.push_back(word == "slotted" ? Placement::kSlotted : Placement::kPacked);
    }
  }
  if (!arguments.stagings.empty()) {
    lists.zero_copy.clear();
    for (const std::string& word : arguments.stagings) {
      lists.zero_copy.push_back(word == "zero-copy");
    }
  }
  if (!arguments.routings.empty()) {
    lists.routings.clear();
    for (const std::string& word : arguments.routings) {
      lists.routings.push_back(word == "hot"    ? BenchRouting::kHot
                               : word == "real" ? BenchRouting::kReal
                                                : BenchRouting::kUniform);
    }
  }
  std::vector<BenchCase> cases;
  add_cases(arguments, lists, cases);
  return cases;
}

}  // namespace

void add_options(CLI::App& app, BenchArguments& arguments) {
  const auto list = [&](const std::string& option, auto& target, const std::string& help) {
    return app.add_option(option, target, help)->delimiter(',');
  };
  add_backend(app, arguments.backend, "where ranks compute");
  add_choice(app, "--launch", arguments.launch, {"threads", "processes", "apart"},
             "what a rank is; apart: a process that shares no memory");
  list("--ranks", arguments.ranks, "numbers of ranks; this and the other lists: 1,2,...")
      ->check(CLI::Range(1, kMaxRanks));
  list("--tokens", arguments.tokens, "tokens of each rank")->check(CLI::Range(1, 1 << 20));
  list("--format", arguments.formats, "dispatched rows")
      ->check(CLI::IsMember({"bf16", "fp8", "fp8-pow2", "fp8-ue8m0"}));
  list("--placement", arguments.placements, "how a row finds its place")
      ->check(CLI::IsMember({"packed", "slotted"}));
  list("--staging", arguments.stagings, "what combine is given")
      ->check(CLI::IsMember({"zero-copy", "staged"}));
  list("--routing", arguments.routings, "real: E and K are the file's")
      ->check(CLI::IsMember({"uniform", "hot", "real"}));
  add_number(app, "--hidden", arguments.hidden, 1, kMaxHidden, "channels of a token");
  add_number(app, "--topk", arguments.topk, 1, kMaxTopk, "experts that a token selects");
  add_number(app, "--experts", arguments.experts, 1, 1 << 20, "experts over all ranks");
  add_number(app, "--sms", arguments.sms, 0, 1024,
             "multiprocessors of each rank; 0: an equal share");
  add_choice(app, "--layout", arguments.layout, {"automatic", "padded", "packed"},
             "of the rows received; automatic: padded up to 128 tokens");
  app.add_option("--data", arguments.data, "where the real routing is")
      ->type_name("FILE.safetensors")
      ->capture_default_str()
      ->take_last();
  add_number(app, "--operations", arguments.operations, 0, 1000,
             "operations of a recording; 0: 100, or 20 where they are long");
  add_number(app, "--replays", arguments.replays, 0, 100'000,
             "timed runs; 0: 20 to 100 by their length");
  app.add_option("--budget", arguments.budget_s, "start no case after so many seconds")
      ->capture_default_str()
      ->take_last();
  add_timeout(app, arguments.timeout_s);
  app.add_option("--seed", arguments.seed, "of routing")->capture_default_str()->take_last();
  add_json(app, arguments.json);
}

BenchOptions resolve(const BenchArguments& arguments) {
  if (arguments.topk > arguments.experts) {
    throw UsageError(fmt::format("--topk {} is more than --experts {}: tokens select distinct ones",
                                 arguments.topk, arguments.experts));
  }
  const bool named = !arguments.ranks.empty() || !arguments.tokens.empty() ||
                     !arguments.formats.empty() || !arguments.placements.empty() ||
                     !arguments.stagings.empty() || !arguments.routings.empty();
  return {.backend = backend_of(arguments.backend),
          .launch = launch_of(arguments.launch),
          .cases = named ? named_cases(arguments) : standard_cases(arguments),
          .data = arguments.data,
          .operations = arguments.operations,
          .replays = arguments.replays,
          .budget = std::chrono::duration<double>(arguments.budget_s),
          .timeout = timeout_of(arguments.timeout_s),
          .seed = arguments.seed};
}

}  // namespace tandem::tools
