// A rendezvous as anybody sees it who knows its name: an abstract Unix socket.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "runtime/descriptor.h"

namespace tandem::runtime {

struct RawAddress {
  sockaddr_un socket{};
  socklen_t length = 0;

  explicit RawAddress(const std::string& name) {
    const std::string text = "tandem." + std::to_string(geteuid()) + "." + name;
    socket.sun_family = AF_UNIX;
    std::memcpy(socket.sun_path + 1, text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket); }
};

inline Descriptor raw_socket() {
  return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

// A connection to the rendezvous; empty if nobody listens.
inline Descriptor try_connect_raw(const std::string& name) {
  const RawAddress address(name);
  Descriptor raw = raw_socket();
  if (::connect(raw.get(), address.get(), address.length) != 0) return {};
  return raw;
}

}  // namespace tandem::runtime
