#include "tools/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

extern char** environ;

namespace tandem::tools {

namespace {

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<pid_t> children_of(pid_t parent) {
  const std::string id = std::to_string(parent);
  std::istringstream list(read_file("/proc/" + id + "/task/" + id + "/children"));
  std::vector<pid_t> processes;
  for (pid_t process; list >> process;) processes.push_back(process);
  return processes;
}

// Has it used more processor time than set-up takes? That is 5 to 10 ms; where others keep the
// processors busy, ranks get hardly more than 2 ms of a second, since they wait for each other.
bool is_at_work(pid_t process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  std::getline(stat, line);
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos) return false;
  std::istringstream fields(line.substr(end + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  long user_ticks = 0;  // field 14, of 10 ms
  long system_ticks = 0;
  fields >> user_ticks >> system_ticks;
  return user_ticks + system_ticks >= 5;
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

pid_t RunningCommand::rank_at_work(int rank, std::size_t num_ranks) const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  while (std::chrono::steady_clock::now() < deadline) {
    const std::vector<pid_t> ranks = children_of(process_);  // forked in the order of ranks
    if (ranks.size() == num_ranks && is_at_work(ranks[rank])) return ranks[rank];
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // nothing depends on it
  }
  return -1;
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
