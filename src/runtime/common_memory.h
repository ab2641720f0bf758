// One piece of memory that rank 0 makes and every rank of a buffer maps. It stays while anybody
// maps it, whatever becomes of rank 0.
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
