// `tandem test-low-latency` with ranks as threads: its JSON, and that every option reaches the
// operation, told by what the operation was seen to do (`observed`), not by what was asked.
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>

#include "tools/command.h"

namespace tandem::tools {
namespace {

using nlohmann::json;

const std::string kSmall =
    "test-low-latency --json - --ranks 3 --tokens 5 --hidden 260 --topk 3 --experts 7 "
    "--iterations 2 --timeout 10 ";
const std::string kOne =
    kSmall + "--format bf16 --placement slotted --layout padded --zero-copy off --hook off ";

json run_ok(const std::string& words) {
  const CommandResult result = run_command(words);
  EXPECT_EQ(result.exit_code, 0) << words << "\n" << result.errors;
  json object = result.json();
  EXPECT_EQ(object["ok"], true);
  EXPECT_EQ(object["failures"], json::array());
  EXPECT_GT(object["checks"].get<int>(), 0);
  for (const json& one : object["results"]) EXPECT_EQ(one["bitwise_equal"], true);
  return object;
}

// The only result's.
json run_one(const std::string& words) {
  json object = run_ok(words);
  EXPECT_EQ(object["results"].size(), 1U);
  return object["results"][0];
}

std::int64_t sum_of(const json& numbers) {
  const auto list = numbers.get<std::vector<std::int64_t>>();
  return std::accumulate(list.begin(), list.end(), std::int64_t{0});
}

TEST(TestLowLatency, JsonHasTheFieldsOfTheContract) {
  const json result = run_one(kOne);
  for (const char* member : {"backend", "ranks", "launch", "tokens", "hidden", "topk", "experts",
                             "format", "placement", "layout", "zero_copy", "hook", "dispatch_us",
                             "combine_us", "max_abs_error", "bitwise_equal"}) {
    EXPECT_TRUE(result.contains(member)) << member;
  }
  EXPECT_EQ(result["backend"], "cpu");
  EXPECT_EQ(result["ranks"], 3);
  EXPECT_EQ(result["launch"], "threads");
  EXPECT_EQ(result["tokens"], 5);
  EXPECT_EQ(result["hidden"], 260);
  EXPECT_EQ(result["topk"], 3);
  EXPECT_EQ(result["experts"], 7);
  EXPECT_EQ(result["format"], "bf16");
  EXPECT_EQ(result["placement"], "slotted");
  EXPECT_EQ(result["layout"], "padded");
  EXPECT_EQ(result["zero_copy"], false);
  EXPECT_EQ(result["hook"], false);
  EXPECT_EQ(result["max_abs_error"], 0.0);
  for (const char* time : {"dispatch_us", "combine_us"}) {
    EXPECT_GT(result[time]["median"].get<double>(), 0);
    EXPECT_GE(result[time]["p99"].get<double>(), result[time]["median"].get<double>());
  }
}

TEST(TestLowLatency, EveryCombinationIsRight) {
  const json object =
      run_ok(kSmall +
             "--format all --placement all --layout all --zero-copy both --hook both "
             "--iterations 1");
  EXPECT_EQ(object["results"].size(), 72U);
  EXPECT_FALSE(object["bandwidth_counts"].get<std::string>().empty());
}

TEST(TestLowLatency, UnevenRanksAreRightInEveryCombination) {
  const json object = run_ok(
      kSmall + "--ranks 4 --uneven --format all --placement all --layout all --iterations 0");
  EXPECT_EQ(object["results"].size(), 72U);
  const json& observed = object["results"][0]["observed"];
  const auto sent = observed["sent_tokens"].get<std::set<int>>();
  EXPECT_TRUE(sent.contains(0));
  EXPECT_TRUE(sent.contains(5));
  EXPECT_EQ(observed["local_experts"][3], 0);
  EXPECT_EQ(sum_of(observed["local_experts"]), 7);
}

TEST(TestLowLatency, RanksTokensTopkExpertsAndMaskReachTheOperation) {
  const json observed = run_one(kOne + "--masked 4")["observed"];
  EXPECT_EQ(observed["backend"], "cpu");
  EXPECT_EQ(observed["sent_tokens"], (json{5, 5, 5}));
  EXPECT_EQ(observed["local_experts"], (json{3, 2, 2}));
  EXPECT_EQ(sum_of(observed["received_rows"]), 3 * (5 * 3 - 4));
  EXPECT_EQ(sum_of(run_one(kOne + "--masked 0")["observed"]["received_rows"]), 3 * 5 * 3);
  EXPECT_EQ(sum_of(run_one(kOne + "--masked 99")["observed"]["received_rows"]), 0);
}

TEST(TestLowLatency, HiddenReachesTheOperation) {
  EXPECT_EQ(run_one(kOne + "--masked 0 --hidden 1")["dispatch_bytes"], 45 * 2);
  EXPECT_EQ(run_one(kOne + "--masked 0 --hidden 1000")["dispatch_bytes"], 45 * 2000);
}

TEST(TestLowLatency, FormatReachesTheOperation) {
  EXPECT_EQ(run_one(kOne + "--format bf16")["observed"]["value_dtype"], "bf16");
  EXPECT_EQ(run_one(kOne + "--format fp16")["observed"]["value_dtype"], "fp16");
  EXPECT_EQ(run_one(kOne + "--format fp32")["observed"]["value_dtype"], "fp32");
  std::set<std::string> hashes;  // the three fp8 formats differ in their scales
  for (const char* format : {"fp8", "fp8-pow2", "fp8-ue8m0"}) {
    const json result = run_one(kOne + "--format " + format);
    EXPECT_NE(result["observed"]["value_dtype"], "bf16");
    hashes.insert(result["hash"]);
  }
  EXPECT_EQ(hashes.size(), 3U);
}

TEST(TestLowLatency, PlacementReachesTheOperation) {
  EXPECT_EQ(run_one(kOne + "--placement slotted")["observed"]["into_callers_tensor"], true);
  EXPECT_EQ(run_one(kOne + "--placement packed")["observed"]["into_callers_tensor"], false);
}

TEST(TestLowLatency, LayoutReachesTheOperation) {
  EXPECT_EQ(run_one(kOne + "--layout padded")["observed"]["received_dims"], 3);
  EXPECT_EQ(run_one(kOne + "--layout packed")["observed"]["received_dims"], 2);
}

TEST(TestLowLatency, ZeroCopyReachesTheOperation) {
  EXPECT_EQ(run_one(kOne + "--zero-copy on")["observed"]["combine_buffer_taken"], true);
  EXPECT_EQ(run_one(kOne + "--zero-copy off")["observed"]["combine_buffer_taken"], false);
}

TEST(TestLowLatency, HookReachesTheOperationAndItsPartsAreTimedApart) {
  const json with = run_one(kOne + "--hook on");
  EXPECT_EQ(with["observed"]["hook_returned"], true);
  for (const char* part :
       {"dispatch_send_us", "dispatch_receive_us", "combine_send_us", "combine_receive_us"}) {
    EXPECT_GT(with[part]["median"].get<double>(), 0) << part;
  }
  const json without = run_one(kOne + "--hook off");
  EXPECT_EQ(without["observed"]["hook_returned"], false);
  EXPECT_FALSE(without.contains("dispatch_send_us"));
}

TEST(TestLowLatency, ThreadsAreOneProcess) {
  EXPECT_EQ(run_one(kOne + "--launch threads")["observed"]["processes"], 1);
}

TEST(TestLowLatency, IterationsAreAsManyAsAsked) {
  EXPECT_EQ(run_one(kOne + "--iterations 7")["iterations"], 7);
  const json none = run_one(kOne + "--iterations 0");
  EXPECT_EQ(none["iterations"], 0);
  EXPECT_TRUE(none["dispatch_us"].is_null());
}

TEST(TestLowLatency, TimeoutReachesTheBuffer) {
  EXPECT_EQ(run_one(kOne + "--timeout 12.5")["observed"]["timeout_s"], 12.5);
}

TEST(TestLowLatency, SeedChangesTheProblemAndNothingElseDoes) {
  const std::string first = run_one(kOne + "--seed 1")["hash"];
  EXPECT_EQ(run_one(kOne + "--seed 1")["hash"], first);
  EXPECT_NE(run_one(kOne + "--seed 2")["hash"], first);
  EXPECT_EQ(run_one(kOne + "--seed 1 --placement packed --layout packed")["hash"], first);
}

TEST(TestLowLatency, PressureRunsFurtherSeeds) {
  const json object = run_ok(kOne + "--pressure 20 --iterations 1");
  EXPECT_EQ(object["results"][0]["seeds"], 21);
  EXPECT_EQ(object["pressure"], 20);
  const json uneven = run_ok(kOne + "--pressure 5 --iterations 0 --uneven");
  EXPECT_EQ(uneven["results"][0]["seeds"], 6);
}

TEST(TestLowLatency, NoTokensAreFine) {
  const json result = run_one(kOne + "--tokens 0");
  EXPECT_EQ(sum_of(result["observed"]["received_rows"]), 0);
}

TEST(TestLowLatency, MissingBackendIsAClearFailure) {
  const json info = run_command("info --json -").json();
  if (info["backends"][1]["usable"].get<bool>()) return;  // then there is nothing missing
  const CommandResult result = run_command(kOne + "--backend cuda");
  EXPECT_EQ(result.exit_code, 1);
  // "backend cuda was not built", or "no CUDA device".
  EXPECT_NE(result.errors.find(info["backends"][1]["why_not"].get<std::string>()),
            std::string::npos)
      << result.errors;
  const json object = result.json();
  EXPECT_EQ(object["ok"], false);
  EXPECT_EQ(object["failures"].size(), 3U);  // one of each rank
  EXPECT_TRUE(object["failures"].at(0).contains("rank"));
}

TEST(TestLowLatency, TableIsForPeopleAndSaysWhatIsCounted) {
  const CommandResult result = run_command(
      "test-low-latency --ranks 2 --tokens 4 --hidden 64 --topk 2 --experts 4 --iterations 2");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("send+receive"), std::string::npos);
  EXPECT_NE(result.output.find("GB/s (10^9 bytes)"), std::string::npos);
  EXPECT_NE(result.output.find("0 failures"), std::string::npos);
  EXPECT_EQ(result.output.find('\x1b'), std::string::npos);  // no terminal: no colour
  EXPECT_EQ(result.errors, "");                              // and no progress
}

}  // namespace
}  // namespace tandem::tools
