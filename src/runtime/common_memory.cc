#include "runtime/common_memory.h"

#include <optional>
#include <string>
#include <vector>

#include "runtime/agreement.h"
#include "runtime/memory_file.h"

namespace tandem::runtime {

CommonMemory::CommonMemory(Bootstrap& bootstrap, const char* name, std::int64_t size_bytes,
                           SymmetricMemory::Kind kind) {
  std::optional<Failure> failure;
  const auto check = [&](const std::string& problem) {
    if (failure || problem.empty()) return;
    failure = setup_failure(ErrorCode::kResource, bootstrap.rank(),
                            "rank " + std::to_string(bootstrap.rank()) + " cannot have " +
                                std::to_string(size_bytes) + " bytes of common memory: " + problem);
  };
  Bootstrap& host = bootstrap.host();
  const bool threads = host.in_one_process();
  // Everybody makes one, since exchanges are symmetric; that of the first counts. An unused one
  // takes no memory.
  if (!threads || kind == SymmetricMemory::Kind::kAlwaysFile) {
    MemoryFile own = make_memory_file(name, size_bytes);
    check(own.problem);
    file_ = std::move(own.descriptor);
  }
  Mapping mapping;
  if (threads && !failure) {
    mapping = file_ ? map_shared(file_, size_bytes) : map_private(size_bytes);
    check(mapping.problem);
  }
  agree(bootstrap, failure);
  if (threads) {
    mapping.memory = std::static_pointer_cast<std::byte>(
        std::move(host.all_gather_objects(mapping.memory).front()));
    if (file_) {
      const auto files = host.all_gather_objects(std::make_shared<Descriptor>(std::move(file_)));
      file_ = std::static_pointer_cast<Descriptor>(files.front())->duplicate();
    }
  } else {
    std::vector<Descriptor> files = host.all_gather_descriptors(file_);
    file_ = std::move(files.front());
    mapping.problem = "the first rank of this host sent something else";
    if (is_memory_file(file_, size_bytes)) mapping = map_shared(file_, size_bytes);
    check(mapping.problem);
  }
  agree(bootstrap, failure);
  memory_ = std::move(mapping.memory);
}

CommonMemory::CommonMemory(Descriptor file, std::int64_t size_bytes) : file_(std::move(file)) {
  if (!is_memory_file(file_, size_bytes)) {
    throw Error(ErrorCode::kMismatch, "what a rank offered is no sealed memory of " +
                                          std::to_string(size_bytes) + " bytes");
  }
  Mapping mapping = map_shared(file_, size_bytes);
  if (!mapping.problem.empty()) {
    throw Error(ErrorCode::kResource,
                "no common memory of " + std::to_string(size_bytes) + " bytes: " + mapping.problem);
  }
  memory_ = std::move(mapping.memory);
}

}  // namespace tandem::runtime
