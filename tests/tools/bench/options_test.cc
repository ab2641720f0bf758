#include "bench/options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "common/report.h"

namespace tandem::tools {
namespace {

bool has(const std::vector<BenchCase>& cases, const std::function<bool(const BenchCase&)>& wanted) {
  return std::any_of(cases.begin(), cases.end(), wanted);
}

// Every figure that the documentation sets a goal for is among the standard cases.
TEST(BenchOptions, StandardCasesHoldTheGoals) {
  const std::vector<BenchCase> cases = resolve(BenchArguments{}).cases;
  const auto holds = [&](int ranks, int tokens, Format format, Placement placement,
                         bool zero_copy) {
    return has(cases, [&](const BenchCase& work) {
      return work.ranks == ranks && work.tokens == tokens && work.format == format &&
             work.placement == placement && work.zero_copy == zero_copy && work.hidden == 7168 &&
             work.topk == 8 && work.experts == 64 && work.routing == BenchRouting::kUniform;
    });
  };
  for (const int tokens : {128, 32, 8, 1}) {
    EXPECT_TRUE(holds(2, tokens, Format::kBFloat16, Placement::kPacked, true)) << tokens;
  }
  EXPECT_TRUE(holds(2, 128, Format::kBFloat16, Placement::kSlotted, false));
  for (const Format format : {Format::kBFloat16, Format::kFp8}) {
    EXPECT_TRUE(holds(8, 128, format, Placement::kPacked, true));
  }
  EXPECT_TRUE(holds(8, 8, Format::kBFloat16, Placement::kPacked, true));
  for (const int ranks : {1, 2, 4, 8, 16}) {
    for (const int tokens : {1, 8, 32, 128, 512, 4096}) {
      EXPECT_TRUE(holds(ranks, tokens, Format::kBFloat16, Placement::kPacked, true))
          << ranks << " ranks, " << tokens << " tokens";
    }
  }
  for (const BenchRouting routing : {BenchRouting::kHot, BenchRouting::kReal}) {
    EXPECT_TRUE(has(cases, [&](const BenchCase& work) { return work.routing == routing; }));
  }
}

TEST(BenchOptions, ListsAreCombinedEachWithEach) {
  BenchArguments arguments;
  arguments.ranks = {2, 4};
  arguments.tokens = {1, 2, 3};
  arguments.stagings = {"staged", "zero-copy"};
  const std::vector<BenchCase> cases = resolve(arguments).cases;
  EXPECT_EQ(cases.size(), 12U);
  EXPECT_TRUE(has(cases, [](const BenchCase& work) {
    return work.ranks == 4 && work.tokens == 3 && !work.zero_copy;
  }));
}

TEST(BenchOptions, EveryOptionReachesTheCases) {
  BenchArguments arguments;
  arguments.backend = "cpu";
  arguments.launch = "processes";
  arguments.formats = {"fp8"};
  arguments.placements = {"slotted"};
  arguments.routings = {"hot"};
  arguments.hidden = 100;
  arguments.topk = 3;
  arguments.experts = 5;
  arguments.sms = 7;
  arguments.layout = "packed";
  arguments.operations = 11;
  arguments.replays = 13;
  arguments.seed = 17;
  const BenchOptions options = resolve(arguments);
  EXPECT_EQ(options.backend, Backend::kCpu);
  EXPECT_EQ(options.launch, Launch::kProcesses);
  EXPECT_EQ(options.operations, 11);
  EXPECT_EQ(options.replays, 13);
  EXPECT_EQ(options.seed, 17U);
  ASSERT_EQ(options.cases.size(), 1U);
  EXPECT_EQ(describe(options.cases[0]),
            "2 ranks x 7 SMs T 128 H 100 K 3 E 5 fp8 slotted zero-copy hot");
  EXPECT_EQ(options.cases[0].layout, Layout::kPacked);
}

TEST(BenchOptions, MoreSelectionsThanExpertsAreRefused) {
  BenchArguments arguments;
  arguments.topk = 9;
  arguments.experts = 8;
  EXPECT_THROW(resolve(arguments), UsageError);
}

}  // namespace
}  // namespace tandem::tools
