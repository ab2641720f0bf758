// What a process holds: how a soak tells that nothing is left behind.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace tandem::tools {

struct Holdings {
  std::int64_t memory_bytes = 0;  // resident, without the pages of program files
  int descriptors = 0;
};

// Of this process, after what is free has been given back to the system.
[[nodiscard]] Holdings holdings();

// "" or what is more after than before. 2 MiB of memory may be, and `allowed_bytes` more: what the
// allocator keeps of all that came and went. A buffer's block has more.
[[nodiscard]] std::string what_is_left(const Holdings& before, const Holdings& after,
                                       std::int64_t allowed_bytes = 0);

void to_json(nlohmann::json& json, const Holdings& holdings);
void from_json(const nlohmann::json& json, Holdings& holdings);

}  // namespace tandem::tools
