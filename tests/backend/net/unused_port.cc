#include "backend/net/unused_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

namespace tandem::test {

int unused_port() {
  static int port = 10'000 + ::getpid() % 2000 * 10;
  for (;; ++port) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool is_free =
        ::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(listener);
    if (is_free) return port++;
  }
}

}  // namespace tandem::test
