// One piece of memory that the first rank of a host makes and every rank of a buffer on that host
// maps. It stays while anybody maps it, whatever becomes of the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "runtime/bootstrap.h"
#include "runtime/descriptor.h"

namespace tandem::runtime {

class CommonMemory {
 public:
  // Collective. Zero-filled. `name` is what /proc shows. Throws kResource.
  CommonMemory(Bootstrap& bootstrap, const char* name, std::int64_t size_bytes);

  [[nodiscard]] std::byte* data() const { return memory_.get(); }

 private:
  std::shared_ptr<std::byte> memory_;
};

}  // namespace tandem::runtime
