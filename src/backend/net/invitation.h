// What a process is told that is to become a rank of a running buffer: where the ranks are, and how
// they know each other's messages. Both come from peers, so decoding believes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tandem::net {

struct Acquaintance {
  int rank = 0;
  std::uint64_t token = 0;         // what messages of that process carry
  std::vector<std::byte> address;  // of its UCX worker
};
using AddressBook = std::vector<Acquaintance>;

struct Invitation {
  std::uint32_t channel = 0;  // the buffer's
  AddressBook book;
  std::vector<std::byte> situation;  // an encoded runtime::Situation
};

// decode refuses what encode cannot have written: a rank that cannot be, or comes twice.
std::vector<std::byte> encode(const AddressBook& book);
std::optional<AddressBook> decode_book(std::span<const std::byte> bytes);
std::vector<std::byte> encode(const Invitation& invitation);
std::optional<Invitation> decode_invitation(std::span<const std::byte> bytes);

}  // namespace tandem::net
