// `tandem run-layer` on the layer that comes with the project.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <string>

#include "tools/command.h"

namespace tandem::tools {
namespace {

using nlohmann::json;

const std::string kRun =
    std::string("run-layer ") + TANDEM_LAYER_FILE + " --json - --iterations 1 ";

json run_ok(const std::string& words) {
  const CommandResult result = run_command(kRun + words);
  EXPECT_EQ(result.exit_code, 0) << words << "\n" << result.errors;
  json object = result.json();
  EXPECT_EQ(object["ok"], true);
  EXPECT_EQ(object["failures"], json::array());
  return object;
}

TEST(RunLayer, JsonHasTheFieldsOfTheContract) {
  const json object = run_ok("--ranks 2");
  const json& layer = object["layer"];
  EXPECT_LT(layer["max_abs_error"].get<double>(), 1e-3);
  EXPECT_LE(layer["mean_abs_error"].get<double>(), layer["max_abs_error"].get<double>());
  EXPECT_EQ(layer["tokens_per_expert"]["mean"], 128);
  EXPECT_GE(layer["tokens_per_expert"]["max"].get<int>(), 128);
  EXPECT_LE(layer["tokens_per_expert"]["min"].get<int>(), 128);
  const json& result = object["results"].at(0);
  EXPECT_EQ(result["ranks"], 2);
  EXPECT_EQ(result["tokens"], 1024);
  EXPECT_EQ(result["experts"], 32);
  EXPECT_EQ(result["bitwise_equal"], true);
  EXPECT_EQ(result["tokens_per_rank"]["mean"], 2048);
  for (const char* part : {"dispatch_us", "experts_us", "combine_us"}) {
    EXPECT_GT(result[part]["median"].get<double>(), 0) << part;
  }
}

TEST(RunLayer, ResultIsTheSameForEveryNumberOfRanksAndEveryWay) {
  std::set<std::string> hashes;
  for (const char* words :
       {"--ranks 1", "--ranks 2", "--ranks 3", "--ranks 4", "--ranks 8", "--ranks 32",
        "--ranks 3 --placement slotted", "--ranks 3 --layout padded", "--ranks 3 --zero-copy off",
        "--ranks 3 --placement slotted --layout padded --zero-copy off"}) {
    hashes.insert(run_ok(words)["results"].at(0)["hash"].get<std::string>());
  }
  EXPECT_EQ(hashes.size(), 1U);
}

TEST(RunLayer, RunsTheOtherRoutingsToo) {
  const json object = run_ok("--ranks 4 --routing routing.1");
  ASSERT_EQ(object["results"].size(), 2U);
  const json& result = object["results"].at(1);
  EXPECT_EQ(result["routing"], "routing.1");
  EXPECT_EQ(result["tokens"], 8192);
  EXPECT_EQ(result["tokens_per_expert"]["mean"], 1024);
  EXPECT_TRUE(result["max_abs_error"].is_null());
}

TEST(RunLayer, IterationsAndTimeoutAreTaken) {
  const json result = run_ok("--ranks 2 --iterations 3 --timeout 12.5")["results"].at(0);
  EXPECT_EQ(result["iterations"], 3);
  EXPECT_EQ(result["timeout_s"], 12.5);  // of the buffer
}

TEST(RunLayer, DamagedFileIsAClearFailure) {
  const std::string path =
      testing::TempDir() + "tandem_damaged_" + std::to_string(getpid()) + ".safetensors";
  std::ofstream(path) << "not a layer at all";
  const CommandResult result = run_command("run-layer " + path + " --json -");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.errors.find("not a valid safetensors file"), std::string::npos);
  EXPECT_EQ(result.json()["ok"], false);
  unlink(path.c_str());
}

TEST(RunLayer, MissingFileAndRoutingAreClearFailures) {
  const CommandResult missing = run_command("run-layer /nonexistent.safetensors");
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_NE(missing.errors.find("cannot open '/nonexistent.safetensors'"), std::string::npos);
  const CommandResult routing = run_command(kRun + "--routing no-such");
  EXPECT_EQ(routing.exit_code, 1);
  EXPECT_NE(routing.errors.find("no-such"), std::string::npos);
  EXPECT_EQ(run_command("run-layer").exit_code, 2);
}

TEST(RunLayer, TellsPeopleErrorsSkewAndTimes) {
  const CommandResult result =
      run_command(std::string("run-layer ") + TANDEM_LAYER_FILE + " --ranks 2 --iterations 1");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const char* words : {"error against y", "bit for bit", "busiest", "quietest", "dispatch"}) {
    EXPECT_NE(result.output.find(words), std::string::npos) << words;
  }
}

}  // namespace
}  // namespace tandem::tools
