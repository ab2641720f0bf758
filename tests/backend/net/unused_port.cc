#include "backend/net/unused_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/descriptor.h"
#include "runtime/local_socket.h"

namespace tandem::test {
namespace {

using runtime::Descriptor;

bool is_free(int port) {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

}  // namespace

int unused_port() {
  // Whoever gets a port listens at it much later: until then a name stands for it.
  static std::vector<Descriptor> names;
  static int port = 10'000 + ::getpid() % 2000 * 10;  // where others are not likely to look
  for (;; port = port < 30'000 ? port + 1 : 10'000) {
    Descriptor name = runtime::try_listen("port_" + std::to_string(port), "a test's port");
    if (!name || !is_free(port)) continue;
    names.push_back(std::move(name));
    return port++;
  }
}

}  // namespace tandem::test
