// Reads /proc/<pid>/stat: "pid (name) state ... num_threads ... start_time ...", man 5 proc.
#include "runtime/process_identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>

namespace tandem::runtime {
namespace {

struct Stat {
  char state = 0;
  std::int64_t num_threads = 0;
  std::uint64_t start_time = 0;
};

std::string stat_path(std::uint64_t process) {
  return "/proc/" + std::to_string(process) + "/stat";
}

std::optional<Stat> read_stat(std::uint64_t process) {
  std::ifstream file(stat_path(process));
  std::string line;
  if (!std::getline(file, line)) return {};
  const std::size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 20; ++field) fields >> skipped;
  fields >> stat.num_threads >> skipped >> stat.start_time;
  if (!fields) return {};
  return stat;
}

std::uint64_t pid_namespace() {
  struct stat status {};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

ProcessIdentity own_process() {
  const auto process = static_cast<std::uint64_t>(::getpid());
  const std::optional<Stat> stat = read_stat(process);
  if (!stat) return {};
  return {process, stat->start_time, pid_namespace()};
}

bool is_gone(const ProcessIdentity& process) {
  if (process.process == 0 || process.pid_namespace != pid_namespace()) return false;
  const std::optional<Stat> stat = read_stat(process.process);
  if (!stat) {
    // No such process; or no /proc at all, or no descriptor left to read it with.
    return ::access(stat_path(process.process).c_str(), F_OK) != 0 && errno == ENOENT &&
           ::access("/proc/self/stat", F_OK) == 0;
  }
  if (stat->start_time != process.start_time) return true;
  // A zombie has ended once the threads beside its first have.
  return (stat->state == 'Z' || stat->state == 'X') && stat->num_threads <= 1;
}

}  // namespace tandem::runtime
