// What a command found: checks made, failures, results. One JSON object for programs, an exit code
// for scripts, a closing line for people.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace tandem::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // a check failed, or the command could not do its work
inline constexpr int kExitUsage = 2;   // the command line asks for what cannot be

// A command line that parses but makes no sense.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Failure {
  std::string combination = {};  // empty: of the command as a whole
  int rank = -1;                 // -1: of no rank in particular
  std::string message = {};
};

struct Report {
  std::string command = {};
  std::int64_t checks = 0;
  std::vector<Failure> failures = {};
  nlohmann::json results = nlohmann::json::array();
  nlohmann::json extra = nlohmann::json::object();  // further members of the object

  [[nodiscard]] bool ok() const { return failures.empty(); }
  [[nodiscard]] nlohmann::json to_json() const;
};

std::string describe(const Failure& failure);

// Where people's and programs' output goes: with `--json -` standard output is the JSON's alone.
class Output {
 public:
  // Empty: no JSON. Throws UsageError where the file cannot be written.
  explicit Output(const std::string& json_path);

  // For tables and remarks.
  void print(const std::string& text) const;

  void write(const nlohmann::json& json);

 private:
  std::string path_;
  std::ofstream file_;
};

// Runs a command's body, turning an exception into a failure, prints failures and the closing line,
// writes the JSON, and returns the exit code.
int execute(const std::string& command, const std::string& json_path,
            const std::function<void(Report&, const Output&)>& body);

}  // namespace tandem::tools
