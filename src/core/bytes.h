// Plain values one after the other in a message: written by append, read back by take_front, which
// finds nothing where the message ends too early.
#pragma once

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace tandem::core {

template <typename T>
void append(std::vector<std::byte>& bytes, std::span<const T> values) {
  const auto more = std::as_bytes(values);
  bytes.insert(bytes.end(), more.begin(), more.end());
}

template <typename T>
void append(std::vector<std::byte>& bytes, const T& value) {
  append(bytes, std::span(&value, 1));
}

// Takes a T from the front, if there is one.
template <typename T>
std::optional<T> take_front(std::span<const std::byte>& bytes) {
  T value;
  if (bytes.size() < sizeof value) return {};
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes = bytes.subspan(sizeof value);
  return value;
}

// The same for so many bytes.
inline std::optional<std::span<const std::byte>> take_front(std::span<const std::byte>& bytes,
                                                            std::size_t size) {
  if (bytes.size() < size) return {};
  const auto front = bytes.first(size);
  bytes = bytes.subspan(size);
  return front;
}

}  // namespace tandem::core
