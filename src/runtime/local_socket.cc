#include "runtime/local_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "tandem/error.h"

namespace tandem::runtime {
namespace {

std::uint64_t fnv1a(std::string_view text, std::uint64_t hash) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

std::string hexadecimal(std::uint64_t value) {
  std::string text(16, '0');
  for (int digit = 15; digit >= 0; --digit, value >>= 4)
    text[digit] = "0123456789abcdef"[value & 15];
  return text;
}

struct Address {
  sockaddr_un socket{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* generic() const {
    return reinterpret_cast<const sockaddr*>(&socket);
  }
};

// "\0tandem.<uid>.<name>", with a digest in place of a name that is too long.
Address address_of(const std::string& name) {
  constexpr std::size_t kLongestPlainName = 64;
  std::string text = "tandem." + std::to_string(::geteuid()) + ".";
  if (name.size() <= kLongestPlainName) {
    text += name;
  } else {
    text += name.substr(0, 32) + "#" + hexadecimal(fnv1a(name, 0xcbf29ce484222325U)) +
            hexadecimal(fnv1a(name, 0x9e3779b97f4a7c15U));
  }
  Address address;
  address.socket.sun_family = AF_UNIX;
  std::memcpy(address.socket.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

[[noreturn]] void refuse(const std::string& step, const std::string& what) {
  const int reason = errno;
  throw Error(ErrorCode::kResource, "cannot " + step + ' ' + what + ": " + std::strerror(reason));
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) refuse("create", "a socket");
  return socket;
}

}  // namespace

Descriptor try_listen(const std::string& name, const std::string& what) {
  const Address address = address_of(name);
  Descriptor listener = make_socket();
  if (::bind(listener.get(), address.generic(), address.length) != 0) {
    if (errno == EADDRINUSE) return {};
    refuse("open", what);
  }
  if (::listen(listener.get(), 4096) != 0) refuse("listen for", what);
  return listener;
}

Channel try_connect(const std::string& name, const std::string& what) {
  const Address address = address_of(name);
  Descriptor socket = make_socket();
  if (::connect(socket.get(), address.generic(), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return {};
    refuse("connect to", what);
  }
  Channel channel(std::move(socket));
  const auto peer = channel.peer();
  if (!peer || peer->user != ::geteuid()) {
    throw Error(ErrorCode::kInvalidArgument,
                what + " is held by another user" +
                    (peer ? " (uid " + std::to_string(peer->user) + ")" : "") +
                    "; choose another name");
  }
  return channel;
}

std::string random_rendezvous_name() {
  std::uint64_t random[2] = {};
  if (::getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) {
    throw Error(ErrorCode::kResource,
                std::string("no random bytes for a name: ") + std::strerror(errno));
  }
  return hexadecimal(random[0]) + hexadecimal(random[1]);
}

}  // namespace tandem::runtime
