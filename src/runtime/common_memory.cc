#include "runtime/common_memory.h"

#include <optional>
#include <string>
#include <vector>

#include "runtime/agreement.h"
#include "runtime/memory_file.h"

namespace tandem::runtime {

CommonMemory::CommonMemory(Bootstrap& bootstrap, const char* name, std::int64_t size_bytes) {
  std::optional<Failure> failure;
  const auto check = [&](const std::string& problem) {
    if (problem.empty()) return;
    failure = setup_failure(ErrorCode::kResource, bootstrap.rank(),
                            "rank " + std::to_string(bootstrap.rank()) + " cannot have " +
                                std::to_string(size_bytes) + " bytes of common memory: " + problem);
  };
  if (bootstrap.in_one_process()) {
    Mapping own;
    if (bootstrap.rank() == 0) own = map_private(size_bytes);
    check(own.problem);
    agree(bootstrap, failure);
    memory_ = std::static_pointer_cast<std::byte>(
        std::move(bootstrap.all_gather_objects(own.memory).front()));
    return;
  }
  // Everybody sends a file, since the exchange is symmetric; that of rank 0 counts. An unused one
  // takes no memory.
  const MemoryFile own = make_memory_file(name, size_bytes);
  check(own.problem);
  agree(bootstrap, failure);
  const std::vector<Descriptor> files = bootstrap.all_gather_descriptors(own.descriptor);
  Mapping mapping{.memory = nullptr, .problem = "rank 0 sent something else"};
  if (is_memory_file(files.front(), size_bytes)) mapping = map_shared(files.front(), size_bytes);
  check(mapping.problem);
  agree(bootstrap, failure);
  memory_ = std::move(mapping.memory);
}

}  // namespace tandem::runtime
