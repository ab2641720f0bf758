// Runs the `tandem` command as a user would.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tandem::tools {

struct CommandResult {
  int exit_code = -1;  // 128 + n: ended by signal n
  std::string output;  // standard output
  std::string errors;  // standard error

  // The output as JSON; a failed test where it is none.
  [[nodiscard]] nlohmann::json json() const;
};

// A command that is running. Killed, if it still is, when this goes.
class RunningCommand {
 public:
  explicit RunningCommand(const std::vector<std::string>& arguments);
  ~RunningCommand();
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  [[nodiscard]] pid_t process() const { return process_; }
  // The process of a rank, once it is at work; -1 if that takes more than 90 s.
  [[nodiscard]] pid_t rank_at_work(int rank, std::size_t num_ranks) const;
  CommandResult wait();

 private:
  pid_t process_ = -1;
  std::string output_path_;
  std::string errors_path_;
};

// Words are separated by single spaces.
CommandResult run_command(const std::string& words);

}  // namespace tandem::tools
