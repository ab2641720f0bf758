#include "backend/net/socket_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "runtime/descriptor.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

bool is_same_host(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                            &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr);
}

// Of an address of this host: is its interface at work? An address stays where the interface is
// down, and so does the way to it.
std::optional<bool> is_own_and_up(const SocketAddress& address) {
  ifaddrs* interfaces = nullptr;
  if (::getifaddrs(&interfaces) != 0) return {};
  std::optional<bool> is_up;
  for (const ifaddrs* each = interfaces; each != nullptr && !is_up; each = each->ifa_next) {
    if (!is_same_host(each->ifa_addr, address.generic())) continue;
    is_up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0;
  }
  ::freeifaddrs(interfaces);
  return is_up;
}

}  // namespace

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

bool is_within_reach(const SocketAddress& address) {
  if (const std::optional<bool> is_up = is_own_and_up(address)) return *is_up;
  const runtime::Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) return true;
  if (::connect(socket.get(), address.generic(), address.length) != 0) {
    return errno != ENETUNREACH && errno != EHOSTUNREACH && errno != ENETDOWN;
  }
  // The way is there up to a second before the interface where it begins is, and as long as that
  // has no carrier.
  SocketAddress begin{.storage = {}, .length = sizeof(sockaddr_storage)};
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&begin.storage), &begin.length) !=
             0 ||
         is_own_and_up(begin).value_or(true);
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
