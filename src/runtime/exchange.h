// The kinds of collective exchange that a bootstrap offers. Ranks that meet in different ones are
// told so (kMismatch) instead of misreading each other.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/failure.h"

namespace tandem::runtime {

enum class Exchange : std::uint32_t {
  kBarrier = 0,
  kMessages = 1,
  kDescriptors = 2,
  kObjects = 3,
};

inline const char* name(Exchange exchange) {
  switch (exchange) {
    case Exchange::kBarrier:
      return "barrier";
    case Exchange::kMessages:
      return "all_gather";
    case Exchange::kDescriptors:
      return "all_gather_descriptors";
    case Exchange::kObjects:
      return "all_gather_objects";
  }
  return "an unknown exchange";
}

inline Failure exchange_mismatch(int rank, Exchange seen, int first_rank, Exchange expected) {
  return setup_failure(ErrorCode::kMismatch, rank,
                       "rank " + std::to_string(rank) + " calls " + name(seen) + " while rank " +
                           std::to_string(first_rank) + " calls " + name(expected));
}

}  // namespace tandem::runtime
