// `tandem soak` as a program: what it says, and that it fails where something is wrong.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "tools/command.h"

namespace tandem::tools {
namespace {

using nlohmann::json;

// Something is done to a rank in the first quarter of a second of each session, and of the first
// two a rank is ended where ranks are. Whom nothing is done to must not be late by the timeout.
constexpr const char* kSoon = "--seed 1131 --timeout 2 --launch ";

// How ranks can be started that need no root.
std::vector<std::string> launches() {
  std::vector<std::string> launches = {"threads", "processes"};
#ifdef TANDEM_WITH_NET
  launches.emplace_back("apart");
#endif
  return launches;
}

TEST(Soak, SaysWhatItDid) {
  for (const std::string& launch : launches()) {
    const CommandResult result =
        run_command("soak --minutes 0.02 --ranks 3 --seed 9 --json - --launch " + launch);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_EQ(result.errors, "");
    const json object = result.json();
    EXPECT_EQ(object["ok"], true);
    EXPECT_EQ(object["seed"], 9);
    EXPECT_EQ(object["launch"], launch);
    EXPECT_GT(object["operations"], 0);
    EXPECT_GT(object["rows"], 0);
    EXPECT_EQ(object["checks"], object["rows"]);
    EXPECT_EQ(object["faults"]["ended"], 0);
    EXPECT_EQ(object["errors"]["expected"], 0);
    EXPECT_EQ(object["errors"]["unexpected"], 0);
    EXPECT_GT(object["replays"], 0);
    EXPECT_GT(object["held"]["before"]["memory_bytes"], 0);
    EXPECT_EQ(object["held"]["before"]["descriptors"], object["held"]["after"]["descriptors"]);
    ASSERT_EQ(object.contains("held_by_a_rank"), launch != "threads");
    if (launch != "threads") {
      const json& held = object["held_by_a_rank"];
      EXPECT_GT(held["before"]["memory_bytes"], 0);
      EXPECT_LE(held["after"]["descriptors"], held["before"]["descriptors"]);
    }
  }
}

TEST(Soak, ClosesWithALineForPeople) {
  const CommandResult result = run_command("soak --minutes 0.01 --ranks 2");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  for (const char* word : {"operations", "rows checked", "faults", "errors expected", "unexpected",
                           "memory", "descriptors"}) {
    EXPECT_NE(result.output.find(word), std::string::npos) << word << " in " << result.output;
  }
}

TEST(Soak, SurvivesItsFaults) {
  for (const std::string& launch : launches()) {
    const CommandResult result =
        run_command(std::string("soak --minutes 0.06 --faults --json - ") + kSoon + launch);
    const json object = result.json();
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const json& faults = object["faults"];
    EXPECT_GT(
        faults["ended"].get<int>() + faults["stopped"].get<int>() + faults["delayed"].get<int>(),
        0);
    EXPECT_EQ(object["errors"]["unexpected"], 0);
  }
}

// Whoever has been ended is there again within the session, as another process or thread.
TEST(Soak, ReplacesEndedRanks) {
  for (const std::string launch : {"threads", "processes"}) {
    json object;
    // Whether it comes that far depends on the machine: longer, until somebody has been replaced.
    for (const char* const minutes : {"0.05", "0.2", "0.6"}) {
      const CommandResult result = run_command(std::string("soak --faults --json - --minutes ") +
                                               minutes + ' ' + kSoon + launch);
      object = result.json();
      ASSERT_EQ(result.exit_code, 0) << result.errors;
      if (object["faults"]["joined"] > 0) break;
    }
    EXPECT_GT(object["faults"]["joined"], 0);
    EXPECT_LE(object["faults"]["joined"], object["faults"]["ended"]);
    EXPECT_GE(object["faults"]["returned"], object["faults"]["joined"]);
  }
}

// A rank that is killed by somebody else is no fault of the plan's.
TEST(Soak, FailsWhereARankIsLostUnplanned) {
  RunningCommand command({"soak", "--minutes", "5", "--ranks", "3", "--launch", "processes",
                          "--timeout", "2", "--json", "-"});
  // Had it not met the others yet, they would wait for it as long as this test may take.
  const pid_t rank_1 = command.rank_at_work(1, 3);
  ASSERT_GT(rank_1, 0);
  kill(rank_1, SIGKILL);
  const CommandResult result = command.wait();
  EXPECT_EQ(result.exit_code, 1);
  const json object = result.json();
  EXPECT_EQ(object["ok"], false);
  EXPECT_GT(object["errors"]["unexpected"], 0);
  EXPECT_FALSE(object["failures"].empty());
}

TEST(Soak, RefusesWhatCannotBe) {
  for (const char* words :
       {"soak --faults --ranks 2", "soak --minutes 0", "soak --minutes x", "soak --ranks 65",
        "soak --launch hosts --hosts 33 --ranks-per-host 2"}) {
    const CommandResult result = run_command(words);
    EXPECT_EQ(result.exit_code, 2) << words;
    EXPECT_FALSE(result.errors.empty()) << words;
  }
}

}  // namespace
}  // namespace tandem::tools
