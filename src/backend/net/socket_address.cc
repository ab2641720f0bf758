#include "backend/net/socket_address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

#include "tandem/error.h"

namespace tandem::net {

SocketAddress resolve(const std::string& text, bool any) {
  const std::size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int problem = host.empty() || port.empty()
                          ? EAI_NONAME
                          : ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (problem != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + text + "' is no address to meet at: " + ::gai_strerror(problem));
  }
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  ::freeaddrinfo(found);
  if (any && address.storage.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address.storage).sin_addr.s_addr = INADDR_ANY;
  } else if (any) {
    reinterpret_cast<sockaddr_in6&>(address.storage).sin6_addr = IN6ADDR_ANY_INIT;
  }
  return address;
}

bool same_secret(const std::string& secret, std::span<const std::byte> guess) {
  unsigned difference = secret.size() == guess.size() ? 0 : 1;
  for (std::size_t i = 0; i < guess.size(); ++i) {
    const auto expected = static_cast<unsigned char>(secret[i % secret.size()]);
    difference |= expected ^ std::to_integer<unsigned>(guess[i]);
  }
  return difference == 0;
}

}  // namespace tandem::net
