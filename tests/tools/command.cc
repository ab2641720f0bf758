#include "tools/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <system_error>

extern char** environ;

namespace tandem::tools {

namespace {

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

}  // namespace

nlohmann::json CommandResult::json() const {
  nlohmann::json parsed = nlohmann::json::parse(output, nullptr, false);
  if (parsed.is_discarded()) {
    ADD_FAILURE() << "no JSON: '" << output << "', standard error: " << errors;
    return nlohmann::json::object();
  }
  return parsed;
}

RunningCommand::RunningCommand(const std::vector<std::string>& arguments) {
  static int number = 0;
  const std::string base = testing::TempDir() + "tandem_command_" + std::to_string(getpid()) + "_" +
                           std::to_string(number++);
  output_path_ = base + ".out";
  errors_path_ = base + ".err";
  std::vector<char*> argv = {const_cast<char*>(TANDEM_COMMAND)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const int flags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output_path_.c_str(), flags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, errors_path_.c_str(), flags, 0600);
  const int error = posix_spawn(&process_, TANDEM_COMMAND, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::system_error(error, std::generic_category(), TANDEM_COMMAND);
}

RunningCommand::~RunningCommand() {
  if (process_ > 0) {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  unlink(output_path_.c_str());
  unlink(errors_path_.c_str());
}

std::vector<pid_t> RunningCommand::children() const {
  const std::string id = std::to_string(process_);
  std::istringstream list(read_file("/proc/" + id + "/task/" + id + "/children"));
  std::vector<pid_t> processes;
  for (pid_t process; list >> process;) processes.push_back(process);
  return processes;
}

CommandResult RunningCommand::wait() {
  int status = 0;
  waitpid(process_, &status, 0);
  process_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(output_path_),
          read_file(errors_path_)};
}

CommandResult run_command(const std::string& words) {
  std::vector<std::string> arguments;
  std::istringstream stream(words);
  for (std::string word; stream >> word;) arguments.push_back(word);
  return RunningCommand(arguments).wait();
}

}  // namespace tandem::tools
