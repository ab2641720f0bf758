// `tandem bench` as a program, on CPU ranks: what it must report, not how fast they are.
#include <gtest/gtest.h>

#include <string>

#include "tools/command.h"

namespace tandem::tools {
namespace {

constexpr const char* kSmall =
    "bench --backend cpu --ranks 2 --tokens 4 --hidden 256 --topk 2 --experts 8 --operations 5 "
    "--replays 4 --json -";

TEST(Bench, ReportsEveryFieldOfARow) {
  for (const std::string more : {" --format bf16,fp8", " --placement slotted --staging staged",
                                 " --layout packed", " --routing hot"}) {
    const CommandResult result = run_command(kSmall + more);
    ASSERT_EQ(result.exit_code, 0) << more << ": " << result.errors;
    const nlohmann::json json = result.json();
    for (const char* key : {"device", "date", "command", "copy_gbs", "rows"}) {
      EXPECT_TRUE(json.contains(key)) << key;
    }
    EXPECT_NE(json["command"].get<std::string>().find("bench --backend cpu"), std::string::npos);
    ASSERT_FALSE(json["rows"].empty());
    for (const nlohmann::json& row : json["rows"]) {
      for (const char* key :
           {"ranks", "sms_per_rank", "launch", "tokens", "hidden", "topk", "experts", "format",
            "placement", "staging", "routing", "dispatch_us", "combine_us", "pair_us",
            "dispatch_p99_us", "combine_p99_us", "pair_p99_us", "bytes", "floor_us"}) {
        EXPECT_TRUE(row.contains(key)) << key;
      }
      EXPECT_GT(row["pair_us"].get<double>(), 0);
      EXPECT_GE(row["pair_p99_us"].get<double>(), row["pair_us"].get<double>());
      EXPECT_EQ(row["per_rank"]["pair_us"].size(), 2U);
    }
  }
}

TEST(Bench, SaysWhereABackendIsMissing) {
  const nlohmann::json info = run_command("info --json -").json();
  if (info["backends"][1]["usable"] == true) return;  // a GPU is at hand
  const CommandResult result = run_command("bench --backend cuda --tokens 1");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_FALSE(result.errors.empty());
}

}  // namespace
}  // namespace tandem::tools
