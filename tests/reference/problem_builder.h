// Small problems for the oracle's tests: float32 tokens of one channel, so that a row is a number.
#pragma once

#include <cstring>
#include <vector>

#include "reference/reference.h"
#include "tandem/numeric.h"

namespace tandem::reference {

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<T> values_of(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline RankInput rank_input(int num_tokens, const std::vector<float>& x,
                            const std::vector<std::int64_t>& topk_idx,
                            const std::vector<float>& topk_weights) {
  return {.num_tokens = num_tokens,
          .x = bytes_of(x),
          .topk_idx = topk_idx,
          .topk_weights = topk_weights};
}

// begin and count of a range, as DispatchResult packs them.
constexpr std::int64_t range(std::int64_t begin, std::int64_t count) {
  return begin * (std::int64_t{1} << 32) + count;
}

}  // namespace tandem::reference
