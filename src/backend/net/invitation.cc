#include "backend/net/invitation.h"

#include "core/bytes.h"
#include "tandem/types.h"

namespace tandem::net {
namespace {

// Of each acquaintance, ascending; its address follows.
struct Entry {
  std::uint64_t token;
  std::int32_t rank;
  std::uint32_t address_bytes;
};

struct Head {
  std::uint32_t channel;
  std::uint32_t book_bytes;
};

}  // namespace

std::vector<std::byte> encode(const AddressBook& book) {
  std::vector<std::byte> bytes;
  for (const Acquaintance& each : book) {
    core::append(bytes, Entry{.token = each.token,
                              .rank = each.rank,
                              .address_bytes = static_cast<std::uint32_t>(each.address.size())});
    core::append(bytes, std::span<const std::byte>(each.address));
  }
  return bytes;
}

std::optional<AddressBook> decode_book(std::span<const std::byte> bytes) {
  AddressBook book;
  while (!bytes.empty()) {
    const auto entry = core::take_front<Entry>(bytes);
    const int least = book.empty() ? 0 : book.back().rank + 1;
    if (!entry || entry->rank < least || entry->rank >= kMaxRanks) return {};
    const auto address = core::take_front(bytes, entry->address_bytes);
    if (!address || address->empty()) return {};
    book.push_back({.rank = entry->rank,
                    .token = entry->token,
                    .address = {address->begin(), address->end()}});
  }
  return book;
}

std::vector<std::byte> encode(const Invitation& invitation) {
  const std::vector<std::byte> book = encode(invitation.book);
  std::vector<std::byte> bytes;
  core::append(bytes, Head{.channel = invitation.channel,
                           .book_bytes = static_cast<std::uint32_t>(book.size())});
  core::append(bytes, std::span<const std::byte>(book));
  core::append(bytes, std::span<const std::byte>(invitation.situation));
  return bytes;
}

std::optional<Invitation> decode_invitation(std::span<const std::byte> bytes) {
  const auto head = core::take_front<Head>(bytes);
  if (!head) return {};
  const auto book_bytes = core::take_front(bytes, head->book_bytes);
  if (!book_bytes) return {};
  auto book = decode_book(*book_bytes);
  if (!book) return {};
  return Invitation{.channel = head->channel,
                    .book = std::move(*book),
                    .situation = {bytes.begin(), bytes.end()}};
}

}  // namespace tandem::net
