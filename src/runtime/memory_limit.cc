// Memory and swap of the machine, or the control group's limit where that is lower.
#include "runtime/memory_limit.h"

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace tandem::runtime {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// One number; "max" and whatever is no number mean no limit.
std::int64_t read_number(const std::string& path) {
  std::int64_t value = 0;
  return std::ifstream(path) >> value ? value : kUnlimited;
}

MemoryLimit machine_limit(const std::string& root) {
  std::int64_t total_kib = 0;
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string key;
    std::int64_t kib = 0;
    if (!(fields >> key >> kib)) continue;
    if (key == "MemTotal:" || key == "SwapTotal:") total_kib += kib;
  }
  return {.bytes = total_kib > 0 ? total_kib * 1024 : kUnlimited, .what = "memory and swap"};
}

// The limit files of this process's control group and of those that enclose it. In a container the
// path may be seen from outside while the mount is seen from inside; then the mount's own root has
// the limit.
std::vector<std::string> limit_files(const std::string& root) {
  std::vector<std::string> files;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:path
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    std::string mount;
    std::string name;
    if (controllers == ",,") {
      mount = root + "/sys/fs/cgroup";
      name = "/memory.max";
    } else if (controllers.find(",memory,") != std::string::npos) {
      mount = root + "/sys/fs/cgroup/memory";
      name = "/memory.limit_in_bytes";
    } else {
      continue;
    }
    while (!path.empty() && path != "/") {
      files.push_back(mount + path + name);
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
    files.push_back(mount + name);
  }
  return files;
}

}  // namespace

MemoryLimit memory_limit(const std::string& root) {
  MemoryLimit limit = machine_limit(root);
  for (const std::string& file : limit_files(root)) {
    const std::int64_t bytes = read_number(file);
    if (bytes < limit.bytes) limit = {.bytes = bytes, .what = "the control group's limit"};
  }
  return limit;
}

}  // namespace tandem::runtime
