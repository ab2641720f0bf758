// The command with ranks as processes, also when one of them is killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <set>
#include <string>
#include <thread>
#include <vector>

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
    const std::string name = entry.path().filename();
    if (name.find("tandem") != std::string::npos) names.insert(name);  // others' come and go
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

#ifdef TANDEM_WITH_NET
std::set<std::string> names_of_namespaces() {
  std::set<std::string> names;
  if (!std::filesystem::exists("/run/netns")) return names;
  for (const auto& entry : std::filesystem::directory_iterator("/run/netns")) {
    names.insert(entry.path().filename());
  }
  return names;
}

TEST(Apart, RanksThatShareNoMemoryGiveTheSameAsThreads) {
  const std::string run =
      "test-low-latency --json - --tokens 5 --hidden 260 --topk 3 --experts 14 --format fp8 "
      "--placement all --layout packed --zero-copy on --hook both --iterations 1 --ranks 3 ";
  const json apart = run_command(run + "--launch apart").json();
  const json threads = run_command(run + "--launch threads").json();
  ASSERT_EQ(apart["results"].size(), 3U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(apart["results"][i]["hash"], threads["results"][i]["hash"]);
    EXPECT_EQ(apart["results"][i]["launch"], "apart");
  }
}

// Of ranks on hosts; where these cannot be made, outside CI, the test is counted as skipped.
json run_on_hosts(const std::string& words) {
  const CommandResult result = run_command(words);
  const std::string text = result.errors + result.output;
  const std::size_t lacking = text.find("hosts need network namespaces");
  if (lacking != std::string::npos && std::getenv("CI") == nullptr) {
    std::cout << "not run: " << text.substr(lacking) << std::endl;
  }
  EXPECT_EQ(result.exit_code, 0) << text;
  return result.json();
}

TEST(Hosts, GiveTheSameAsThreadsAndLeaveNoNamespaceBehind) {
  const auto before = names_of_namespaces();
  const std::string run =
      "test-low-latency --json - --tokens 5 --hidden 260 --topk 3 --experts 14 --format fp8 "
      "--placement all --layout packed --zero-copy on --hook both --iterations 1 ";
  const json hosts = run_on_hosts(run + "--launch hosts --hosts 3 --ranks-per-host 2");
  const json threads = run_command(run + "--launch threads --ranks 6").json();
  ASSERT_EQ(hosts["results"].size(), 3U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(hosts["results"][i]["hash"], threads["results"][i]["hash"]);
    EXPECT_EQ(hosts["results"][i]["launch"], "hosts");
  }
  EXPECT_EQ(names_of_namespaces(), before);
}
#endif

const std::string kLayer =
    std::string("run-layer ") + TANDEM_LAYER_FILE + " --json - --iterations 1 --ranks 3 ";

void expect_same_as_threads(const json& run) {
  EXPECT_EQ(run["ok"], true) << run["failures"].dump(2);
  EXPECT_EQ(run["results"].at(0)["hash"], run_command(kLayer).json()["results"].at(0)["hash"]);
}

TEST(Processes, RunLayerIsTheSameAsInThreads) {
  expect_same_as_threads(run_command(kLayer + "--launch processes").json());
}

#ifdef TANDEM_WITH_NET
TEST(Apart, RunLayerIsTheSameAsInThreads) {
  expect_same_as_threads(run_command(kLayer + "--launch apart").json());
}

TEST(Apart, BenchTimesIt) {
  const CommandResult result = run_command(
      "bench --backend cpu --launch apart --ranks 2 --tokens 4 --hidden 256 --topk 2 --experts 8 "
      "--operations 5 --replays 4 --json -");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const json row = result.json()["rows"].at(0);
  EXPECT_EQ(row["launch"], "apart");
  EXPECT_GT(row["pair_us"].get<double>(), 0);
}

// As on one host (soak_command_test.cc); with a UCX that cannot, nobody is ended.
TEST(Hosts, SoakReplacesEndedRanks) {
  const auto before = names_of_namespaces();
  const bool replaces = run_command("info --json -").json()["network"]["bears_turnover"];
  json faults;
  for (const char* const minutes : {"0.1", "0.4", "1"}) {
    const json object =
        run_on_hosts(std::string("soak --faults --seed 1131 --timeout 4 --json - --launch hosts "
                                 "--hosts 3 --ranks-per-host 2 --minutes ") +
                     minutes);
    ASSERT_EQ(object["errors"]["unexpected"], 0);
    faults = object["faults"];
    if (!replaces || faults["joined"] > 0) break;
  }
  EXPECT_EQ(faults["joined"] > 0, replaces);
  EXPECT_LE(faults["joined"], faults["ended"]);
  EXPECT_EQ(names_of_namespaces(), before);
}

TEST(Hosts, RunLayerIsTheSameAsInThreads) {
  const json hosts = run_on_hosts(kLayer + "--launch hosts --hosts 2 --ranks-per-host 2");
  expect_same_as_threads(hosts);
  EXPECT_EQ(hosts["results"].at(0)["ranks"], 4);
}
#endif

// Three ranks that time one combination and will not end by themselves.
class EndlessRun {
 public:
  EndlessRun()
      : command_({"test-low-latency",
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
                  "2"}) {}

  [[nodiscard]] pid_t rank_1() const { return command_.rank_at_work(1, 3); }

  // Waits for the end and expects failures, those of rank 1's peers naming it, with `reason`.
  json expect_failure(const std::string& reason) {
    const CommandResult result = command_.wait();
    EXPECT_EQ(result.exit_code, 1);
    const json object = result.json();
    EXPECT_EQ(object["ok"], false);
    bool named_by_peer = false;
    for (const json& failure : object["failures"]) {
      const std::string message = failure["message"];
      named_by_peer =
          named_by_peer || (failure["rank"] != 1 && message.find("rank 1") != std::string::npos &&
                            message.find(reason) != std::string::npos);
      EXPECT_EQ(failure["combination"], "bf16 packed packed zero-copy");
    }
    EXPECT_TRUE(named_by_peer) << object["failures"].dump(2);
    return object["failures"];
  }

 private:
  RunningCommand command_;
};

TEST(Processes, KilledRankIsNamedByItsPeersAndLeavesNothing) {
  const std::set<std::string> before = shared_memory_names();
  EndlessRun run;
  const pid_t rank_1 = run.rank_1();
  ASSERT_GT(rank_1, 0);
  const auto killed_at = std::chrono::steady_clock::now();
  ASSERT_EQ(kill(rank_1, SIGKILL), 0);
  const json failures = run.expect_failure("");
  EXPECT_LT(std::chrono::steady_clock::now() - killed_at, std::chrono::seconds(30));
  const bool told = std::any_of(failures.begin(), failures.end(), [](const json& failure) {
    return failure["rank"] == 1 &&
           failure["message"].get<std::string>().find("signal 9") != std::string::npos;
  });
  EXPECT_TRUE(told) << failures.dump(2);
  EXPECT_EQ(shared_memory_names(), before);
}

TEST(Processes, StalledRankIsNamedWithTheTimeoutThatWasAskedFor) {
  EndlessRun run;
  const pid_t rank_1 = run.rank_1();
  ASSERT_GT(rank_1, 0);
  ASSERT_EQ(kill(rank_1, SIGSTOP), 0);
  // The stall. Its peers may have to wait for a processor to see that their 2 s are over.
  std::this_thread::sleep_for(std::chrono::seconds(6));
  ASSERT_EQ(kill(rank_1, SIGCONT), 0);
  run.expect_failure("of 2000 ms");
}

}  // namespace
}  // namespace tandem::tools
