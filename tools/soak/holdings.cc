#include "soak/holdings.h"

#include <dirent.h>
#include <fmt/format.h>
#include <malloc.h>

#include <fstream>

namespace tandem::tools {

namespace {

constexpr std::int64_t kAllowedGrowthBytes = std::int64_t{2} << 20;

}  // namespace

Holdings holdings() {
  malloc_trim(0);
  Holdings holdings;
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name; status.ignore(256, '\n')) {
    std::int64_t kibibytes = 0;
    if ((name == "RssAnon:" || name == "RssShmem:") && status >> kibibytes) {
      holdings.memory_bytes += kibibytes * 1024;
    }
  }
  if (DIR* const directory = opendir("/proc/self/fd")) {
    while (readdir(directory) != nullptr) ++holdings.descriptors;
    closedir(directory);
    holdings.descriptors -= 3;  // ".", ".." and the directory's own
  }
  return holdings;
}

std::string what_is_left(const Holdings& before, const Holdings& after,
                         std::int64_t allowed_bytes) {
  // Fewer is not less than it should be: connections of set-up close in their own time.
  if (after.descriptors > before.descriptors) {
    return fmt::format("{} descriptors before, {} after", before.descriptors, after.descriptors);
  }
  if (after.memory_bytes > before.memory_bytes + kAllowedGrowthBytes + allowed_bytes) {
    return fmt::format("{} bytes of memory before, {} after", before.memory_bytes,
                       after.memory_bytes);
  }
  return {};
}

void to_json(nlohmann::json& json, const Holdings& holdings) {
  json = {{"memory_bytes", holdings.memory_bytes}, {"descriptors", holdings.descriptors}};
}

void from_json(const nlohmann::json& json, Holdings& holdings) {
  holdings = {.memory_bytes = json.at("memory_bytes"), .descriptors = json.at("descriptors")};
}

}  // namespace tandem::tools
