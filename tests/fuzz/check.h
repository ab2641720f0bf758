// What the fuzzers share: an assertion that holds in every build, and numbers that break code.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <type_traits>

namespace tandem::fuzz {

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// Often one of the values at which sizes, signs and shifts go wrong, or near `near`.
template <typename T>
T awkward(FuzzedDataProvider& data, T near) {
  switch (data.ConsumeIntegralInRange(0, 7)) {
    case 0:
      return T{0};
    case 1:
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(near) + 1U);
    case 2:
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(near) - 1U);
    case 3:
      return std::numeric_limits<T>::max();
    case 4:
      return std::numeric_limits<T>::min();
    case 5:
      return static_cast<T>(T{1} << (8 * sizeof(T) - 2));
    case 6:
      return near;
    default:
      return data.ConsumeIntegral<T>();
  }
}

}  // namespace tandem::fuzz
