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
  Bootstrap& host = bootstrap.host();
  Mapping mapping;
  // Everybody sends a file, since the exchange is symmetric; that of the first counts. An unused
  // one takes no memory.
  MemoryFile own;
  if (!host.in_one_process()) {
    own = make_memory_file(name, size_bytes);
    check(own.problem);
  } else if (host.rank() == 0) {
    mapping = map_private(size_bytes);
    check(mapping.problem);
  }
  agree(bootstrap, failure);
  if (host.in_one_process()) {
    mapping.memory = std::static_pointer_cast<std::byte>(
        std::move(host.all_gather_objects(mapping.memory).front()));
  } else {
    const std::vector<Descriptor> files = host.all_gather_descriptors(own.descriptor);
    mapping.problem = "the first rank of this host sent something else";
    if (is_memory_file(files.front(), size_bytes)) mapping = map_shared(files.front(), size_bytes);
    check(mapping.problem);
  }
  agree(bootstrap, failure);
  memory_ = std::move(mapping.memory);
}

}  // namespace tandem::runtime
