#include <gtest/gtest.h>

#include "tools/command.h"

namespace tandem::tools {
namespace {

#ifdef TANDEM_WITH_NET
constexpr bool kHasNetwork = true;
#else
constexpr bool kHasNetwork = false;
#endif

TEST(Info, TellsVersionBackendsAndLimits) {
  const CommandResult result = run_command("info --json -");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["version"].get<std::string>().empty(), false);
  EXPECT_EQ(json["limits"]["hidden"], 65536);
  ASSERT_EQ(json["backends"].size(), 2U);
  EXPECT_EQ(json["backends"][0]["backend"], "cpu");
  EXPECT_EQ(json["backends"][0]["usable"], true);
  EXPECT_FALSE(json["backends"][0]["details"].empty());  // SIMD targets
  const nlohmann::json& cuda = json["backends"][1];
  EXPECT_EQ(cuda["backend"], "cuda");
  EXPECT_NE(cuda["usable"].get<bool>(), !cuda["why_not"].get<std::string>().empty());
  EXPECT_EQ(json["network"]["built"], kHasNetwork);
  EXPECT_EQ(json["network"]["library"].get<std::string>().starts_with("UCX 1."), kHasNetwork);
}

TEST(Info, SpeaksToPeopleToo) {
  const CommandResult result = run_command("info");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.output.find("backend cpu: usable"), std::string::npos) << result.output;
}

TEST(Command, ExplainsItselfAndRefusesNonsenseWithAnotherCode) {
  EXPECT_EQ(run_command("--help").exit_code, 0);
  EXPECT_EQ(run_command("--version").exit_code, 0);
  EXPECT_EQ(run_command("test-low-latency --help").exit_code, 0);
  EXPECT_EQ(run_command("").exit_code, 2);
  const CommandResult unknown = run_command("test-low-latency --frmt bf16");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.errors.find("--frmt"), std::string::npos);
  const CommandResult wrong = run_command("test-low-latency --format bf17");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.errors.find("bf17"), std::string::npos);
  const CommandResult contradiction = run_command("test-low-latency --placement packed --hook on");
  EXPECT_EQ(contradiction.exit_code, 2);
  EXPECT_NE(contradiction.errors.find("contradict"), std::string::npos);
  EXPECT_EQ(run_command("info --json /nonexistent/x.json").exit_code, 2);
}

}  // namespace
}  // namespace tandem::tools
