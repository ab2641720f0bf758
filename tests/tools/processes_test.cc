// The command with ranks as processes, also when one of them is killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "tools/command.h"

namespace tandem::tools {
namespace {

using nlohmann::json;

const std::string kSmall =
    "test-low-latency --json - --launch processes --ranks 3 --tokens 5 --hidden 260 --topk 3 "
    "--experts 7 ";

std::set<std::string> shared_memory_names() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.insert(entry.path().filename());
  }
  return names;
}

TEST(Processes, EveryCombinationIsRight) {
  const CommandResult result =
      run_command(kSmall +
                  "--format all --placement all --layout all --zero-copy both --hook both "
                  "--iterations 1");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const json object = result.json();
  EXPECT_EQ(object["ok"], true);
  ASSERT_EQ(object["results"].size(), 72U);
  EXPECT_EQ(object["results"][0]["observed"]["processes"], 3);
  EXPECT_EQ(object["results"][0]["launch"], "processes");
}

TEST(Processes, GiveTheSameAsThreads) {
  const std::string one = "--format fp8 --placement packed --layout packed --zero-copy on ";
  const json processes = run_command(kSmall + one + "--iterations 1").json();
  const json threads = run_command(kSmall + one + "--launch threads --iterations 1").json();
  EXPECT_EQ(processes["results"].at(0)["hash"], threads["results"].at(0)["hash"]);
}

TEST(Processes, RunLayerIsTheSameAsInThreads) {
  const std::string run =
      std::string("run-layer ") + TANDEM_LAYER_FILE + " --json - --iterations 1 --ranks 3 ";
  const json processes = run_command(run + "--launch processes").json();
  EXPECT_EQ(processes["ok"], true);
  EXPECT_EQ(processes["results"].at(0)["hash"], run_command(run).json()["results"].at(0)["hash"]);
}

TEST(Processes, KilledRankIsNamedByItsPeersAndLeavesNothing) {
  const std::set<std::string> before = shared_memory_names();
  RunningCommand command({"test-low-latency",
                          "--json",
                          "-",
                          "--launch",
                          "processes",
                          "--ranks",
                          "3",
                          "--tokens",
                          "64",
                          "--hidden",
                          "1024",
                          "--topk",
                          "4",
                          "--experts",
                          "8",
                          "--format",
                          "bf16",
                          "--placement",
                          "packed",
                          "--layout",
                          "packed",
                          "--zero-copy",
                          "on",
                          "--iterations",
                          "100000000",
                          "--timeout",
                          "2"});
  // Ranks are at work once they have used some processor time: far beyond what set-up takes.
  const auto busy = [](pid_t process) {
    std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    std::getline(stat, line);
    const std::size_t end = line.rfind(')');
    if (end == std::string::npos) return false;
    std::istringstream fields(line.substr(end + 1));
    std::string skipped;
    for (int field = 3; field < 14; ++field) fields >> skipped;
    long user_ticks = 0;
    fields >> user_ticks;
    return user_ticks > 20;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::vector<pid_t> ranks;
  while (ranks.size() < 3 || !busy(ranks[1])) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // polls; nothing depends on it
    ranks = command.children();
  }
  const auto killed_at = std::chrono::steady_clock::now();
  ASSERT_EQ(kill(ranks[1], SIGKILL), 0);  // forked in the order of ranks
  const CommandResult result = command.wait();
  EXPECT_LT(std::chrono::steady_clock::now() - killed_at, std::chrono::seconds(30));
  EXPECT_EQ(result.exit_code, 1);
  const json object = result.json();
  EXPECT_EQ(object["ok"], false);
  bool killed_told = false;
  bool named_by_peer = false;
  for (const json& failure : object["failures"]) {
    const std::string message = failure["message"];
    killed_told =
        killed_told || (failure["rank"] == 1 && message.find("signal 9") != std::string::npos);
    named_by_peer =
        named_by_peer || (failure["rank"] != 1 && message.find("rank 1") != std::string::npos);
    EXPECT_EQ(failure["combination"], "bf16 packed packed zero-copy");
  }
  EXPECT_TRUE(killed_told) << object["failures"].dump(2);
  EXPECT_TRUE(named_by_peer) << object["failures"].dump(2);
  EXPECT_EQ(shared_memory_names(), before);
}

}  // namespace
}  // namespace tandem::tools
