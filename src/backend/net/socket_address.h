// Where processes that know only an address find each other, and the secret that they say there.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <span>
#include <string>

namespace tandem::net {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* generic() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

// The first address of "host:port"; with `any`, that port on every interface, since the name may
// stand for another address on the host itself than on others. Throws kInvalidArgument.
SocketAddress resolve(const std::string& text, bool any);

// Does this host know a way there at present, over an interface that is up and has a carrier? Sends
// nothing.
bool is_within_reach(const SocketAddress& address);

// No shortcut that would tell, by its time, how much of a guess is right.
bool same_secret(const std::string& secret, std::span<const std::byte> guess);

}  // namespace tandem::net
