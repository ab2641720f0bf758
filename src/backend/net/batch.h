// Several messages in one: each is its frame, its header and its payload, one after the other. What
// comes may be anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace tandem::net {

struct Frame {
  std::uint32_t channel;
  std::uint32_t header_bytes;
  std::uint64_t payload_bytes;
};

// Calls take(channel, header, payload) for each message, up to the first that is not there as a
// whole.
template <typename Take>
void for_each_in_batch(std::span<const std::byte> batch, Take&& take) {
  while (batch.size() >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, batch.data(), sizeof frame);
    batch = batch.subspan(sizeof frame);
    if (frame.header_bytes > batch.size()) return;
    const auto header = batch.first(frame.header_bytes);
    batch = batch.subspan(frame.header_bytes);
    if (frame.payload_bytes > batch.size()) return;
    take(frame.channel, header, batch.first(frame.payload_bytes));
    batch = batch.subspan(frame.payload_bytes);
  }
}

}  // namespace tandem::net
