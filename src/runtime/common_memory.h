// One piece of memory that the first rank of a host makes and every rank of a buffer on that host
// maps. It stays while anybody maps it, whatever becomes of the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "runtime/bootstrap.h"
#include "runtime/descriptor.h"
#include "runtime/symmetric_memory.h"

namespace tandem::runtime {

class CommonMemory {
 public:
  // Collective. Zero-filled. `name` is what /proc shows. Throws kResource.
  CommonMemory(Bootstrap& bootstrap, const char* name, std::int64_t size_bytes,
               SymmetricMemory::Kind kind);

  // Not collective: maps what others share already. Throws kMismatch, kResource.
  CommonMemory(Descriptor file, std::int64_t size_bytes);

  [[nodiscard]] std::byte* data() const { return memory_.get(); }
  // For others to map; empty if it is no file.
  [[nodiscard]] const Descriptor& file() const { return file_; }

 private:
  std::shared_ptr<std::byte> memory_;
  Descriptor file_;
};

}  // namespace tandem::runtime
