// A 64-bit hash of bytes for comparing runs with each other; not for hostile input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace tandem::tools {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
constexpr std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

class Hasher {
 public:
  void add(std::span<const std::byte> bytes) {
    std::size_t position = 0;
    for (; position + 8 <= bytes.size(); position += 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes.data() + position, 8);
      absorb(word);
    }
    std::uint64_t rest = bytes.size() - position;  // the length tells [a] from [a, 0]
    if (position < bytes.size()) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + position, bytes.size() - position);
      absorb(word);
    }
    absorb(rest);
  }

  template <typename T>
  void add_value(const T& value) {
    add(std::as_bytes(std::span(&value, 1)));
  }

  [[nodiscard]] std::uint64_t value() const { return mix(state_); }

 private:
  void absorb(std::uint64_t word) {
    state_ = (state_ ^ word) * 0x9e3779b97f4a7c15U;
    state_ ^= state_ >> 32;
  }

  std::uint64_t state_ = 0x2545f4914f6cdd1dU;
};

}  // namespace tandem::tools
