// How much memory this process could ever have: to refuse, with a figure, what the system would
// promise now and fail to give later (a shared mapping that cannot be backed ends in SIGBUS).
#pragma once

#include <cstdint>
#include <string>

namespace tandem::runtime {

struct MemoryLimit {
  std::int64_t bytes = 0;  // the most that could be had
  std::string what;        // "memory and swap", "limit of the control group", ...
};

// `root` is prefixed to /proc and /sys (tests give a directory of their own).
MemoryLimit memory_limit(const std::string& root = "");

}  // namespace tandem::runtime
