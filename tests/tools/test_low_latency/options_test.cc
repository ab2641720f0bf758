// Each option of the command line, from its words to what the ranks will be told.
#include "test_low_latency/options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <set>
#include <sstream>
#include <string>

#include "common/report.h"

namespace tandem::tools {
namespace {

TestOptions parse(const std::string& words) {
  CLI::App app;
  TestArguments arguments;
  add_options(app, arguments);
  app.parse(words);
  return resolve(arguments);
}

TEST(TestOptions, HostsTimesRanksOnEachAreTheRanks) {
  const TestOptions options = parse("--launch hosts --hosts 3 --ranks-per-host 2");
  EXPECT_EQ(options.launch, Launch::kHosts);
  EXPECT_EQ(options.hosts, 3);
  EXPECT_EQ(options.shape.ranks, 6);
  EXPECT_EQ(parse("--launch hosts --backend cuda").backend, Backend::kCuda);
}

TEST(TestOptions, DefaultsAreOfTheIssueAndCoverEveryLegalWay) {
  const TestOptions options = parse("");
  EXPECT_EQ(options.backend, Backend::kCpu);
  EXPECT_EQ(options.launch, Launch::kThreads);
  EXPECT_EQ(options.shape.ranks, 8);
  EXPECT_EQ(options.shape.tokens, 128);
  EXPECT_EQ(options.shape.hidden, 7168);
  EXPECT_EQ(options.shape.topk, 8);
  EXPECT_EQ(options.shape.experts, 288);
  EXPECT_EQ(options.shape.masked, 10);
  EXPECT_FALSE(options.shape.uneven);
  EXPECT_FALSE(options.iterations.has_value());
  EXPECT_EQ(options.timeout, std::chrono::seconds(30));
  EXPECT_EQ(options.pressure, 0);
  EXPECT_EQ(options.combinations.size(), 12U);  // packed: 2 x 2 without a hook; slotted: 2 x 2 x 2
}

TEST(TestOptions, EveryNumberArrives) {
  const TestOptions options = parse(
      "--ranks 3 --tokens 0 --hidden 1000 --topk 33 --experts 50 --masked 4 --iterations 6 "
      "--timeout 1.5 --seed 99 --pressure 7 --uneven");
  EXPECT_EQ(options.shape.ranks, 3);
  EXPECT_EQ(options.shape.tokens, 0);
  EXPECT_EQ(options.shape.hidden, 1000);
  EXPECT_EQ(options.shape.topk, 33);
  EXPECT_EQ(options.shape.experts, 50);
  EXPECT_EQ(options.shape.masked, 4);
  EXPECT_EQ(options.iterations, 6);
  EXPECT_EQ(options.timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(options.seed, 99U);
  EXPECT_EQ(options.pressure, 7);
  EXPECT_TRUE(options.shape.uneven);
}

TEST(TestOptions, MaskLeavesSomethingUnlessAskedForMore) {
  EXPECT_EQ(parse("--tokens 1").shape.masked, 2);
  EXPECT_EQ(parse("--tokens 0").shape.masked, 0);
  EXPECT_EQ(parse("--tokens 1 --masked 8").shape.masked, 8);
}

TEST(TestOptions, BackendAndLaunchArrive) {
  EXPECT_EQ(parse("--backend cuda").backend, Backend::kCuda);
  EXPECT_EQ(parse("--launch processes").launch, Launch::kProcesses);
}

TEST(TestOptions, SingleChoicesGiveOneCombination) {
  const TestOptions options =
      parse("--format fp8-ue8m0 --placement slotted --layout packed --zero-copy off --hook on");
  ASSERT_EQ(options.combinations.size(), 1U);
  const Combination& combination = options.combinations[0];
  EXPECT_EQ(combination.format, Format::kFp8Ue8m0);
  EXPECT_EQ(combination.placement, Placement::kSlotted);
  EXPECT_EQ(combination.layout, Layout::kPacked);
  EXPECT_FALSE(combination.zero_copy);
  EXPECT_TRUE(combination.hook);
  EXPECT_EQ(describe(combination), "fp8-ue8m0 slotted packed hook");
}

TEST(TestOptions, AllAndBothGiveEveryLegalCombinationOnce) {
  const TestOptions options =
      parse("--format all --placement all --layout all --zero-copy both --hook both");
  std::set<std::string> names;
  for (const Combination& combination : options.combinations) {
    names.insert(describe(combination));
    EXPECT_FALSE(combination.hook && combination.placement == Placement::kPacked);
  }
  EXPECT_EQ(names.size(), 72U);
  EXPECT_EQ(options.combinations.size(), 72U);
}

TEST(TestOptions, PackedPlacementWithHookIsRefusedWhenNamedAndLeftOutOtherwise) {
  EXPECT_THROW(parse("--placement packed --hook on"), UsageError);
  for (const Combination& combination : parse("--placement packed --hook both").combinations) {
    EXPECT_FALSE(combination.hook);
  }
  for (const Combination& combination : parse("--placement all --hook on").combinations) {
    EXPECT_EQ(combination.placement, Placement::kSlotted);
  }
}

TEST(TestOptions, WrongValuesAreRefused) {
  for (const char* words : {"--ranks 0",
                            "--ranks 1025",
                            "--tokens -1",
                            "--hidden 0",
                            "--hidden 65537",
                            "--topk 0",
                            "--topk 65",
                            "--experts 0",
                            "--format bf17",
                            "--placement automatic",
                            "--layout dense",
                            "--zero-copy yes",
                            "--hook maybe",
                            "--masked -1",
                            "--iterations -2",
                            "--timeout 0",
                            "--timeout -1",
                            "--seed x",
                            "--pressure -1",
                            "--launch mpi",
                            "--backend tpu",
                            "--unknown",
                            "stray"}) {
    EXPECT_THROW(parse(words), CLI::ParseError) << words;
  }
}

}  // namespace
}  // namespace tandem::tools
