// A piece of memory that processes share: a sealed, nameless file of zeros (memfd) whose descriptor
// is passed on. It never has a name, so nothing is left behind whatever happens to a process, and
// nobody else can open it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/descriptor.h"

namespace tandem::runtime {

// A mapping, or why there is none.
struct Mapping {
  std::shared_ptr<std::byte> memory;
  std::string problem;
};

// Zeros for this process alone, and the bytes of a file whose size is sealed. A process maps a file
// once: ranks that are its threads see each word at one address, those too that come later and are
// handed the file.
Mapping map_private(std::int64_t size_bytes);
Mapping map_shared(const Descriptor& file, std::int64_t size_bytes);

// A file, or why there is none. `name` is what /proc shows.
struct MemoryFile {
  Descriptor descriptor;
  std::string problem;
};
MemoryFile make_memory_file(const char* name, std::int64_t size_bytes);

// Is this a file that make_memory_file made with that size? (What a peer sent may be anything.)
bool is_memory_file(const Descriptor& file, std::int64_t size_bytes);

}  // namespace tandem::runtime
