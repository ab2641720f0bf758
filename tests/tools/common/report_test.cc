#include "common/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace tandem::tools {
namespace {

std::string temporary_path() {
  return testing::TempDir() + "tandem_report_" + std::to_string(getpid()) + ".json";
}

nlohmann::json read_json(const std::string& path) {
  std::ifstream stream(path);
  return nlohmann::json::parse(stream);
}

TEST(Report, WithoutFailuresIsOk) {
  Report report{.command = "some"};
  report.checks = 3;
  const nlohmann::json json = report.to_json();
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["checks"], 3);
  EXPECT_EQ(json["failures"], nlohmann::json::array());
  EXPECT_EQ(json["results"], nlohmann::json::array());
}

TEST(Report, FailureNamesCombinationAndRank) {
  Report report;
  report.failures.push_back({"bf16 packed padded", 3, "counts: entry 1 is 2, expected 3"});
  const nlohmann::json json = report.to_json();
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["failures"][0]["combination"], "bf16 packed padded");
  EXPECT_EQ(json["failures"][0]["rank"], 3);
  EXPECT_EQ(describe(report.failures[0]),
            "bf16 packed padded: rank 3: counts: entry 1 is 2, expected 3");
}

TEST(Execute, ExitsWithOneWhenACheckFailed) {
  const int code = execute("some", "", [](Report& report, const Output&) {
    report.checks = 1;
    report.failures.push_back({.message = "wrong"});
  });
  EXPECT_EQ(code, kExitFailed);
}

TEST(Execute, ExceptionIsAFailureInTheJson) {
  const std::string path = temporary_path();
  const int code = execute("some", path, [](Report&, const Output&) {
    throw std::runtime_error("no such \xff layer");  // and not even UTF-8
  });
  EXPECT_EQ(code, kExitFailed);
  const nlohmann::json json = read_json(path);
  EXPECT_EQ(json["ok"], false);
  EXPECT_NE(json["failures"][0]["message"].get<std::string>().find("no such"), std::string::npos);
  unlink(path.c_str());
}

TEST(Execute, ExitsWithZeroWhenAllIsWell) {
  const std::string path = temporary_path();
  EXPECT_EQ(execute("some", path, [](Report& report, const Output&) { report.checks = 7; }),
            kExitOk);
  EXPECT_EQ(read_json(path)["checks"], 7);
  unlink(path.c_str());
}

TEST(Execute, RefusesAFileThatCannotBeWrittenBeforeAnyWork) {
  bool worked = false;
  EXPECT_THROW(execute("some", "/nonexistent/directory/file.json",
                       [&](Report&, const Output&) { worked = true; }),
               UsageError);
  EXPECT_FALSE(worked);
}

}  // namespace
}  // namespace tandem::tools
