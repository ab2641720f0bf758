// How durations are written in messages.
#pragma once

#include <chrono>
#include <string>

namespace tandem::core {

inline std::string milliseconds(std::chrono::nanoseconds duration) {
  if (duration == std::chrono::nanoseconds::max()) return "forever";
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count()) +
         " ms";
}

}  // namespace tandem::core
