// Frames over a Unix-domain stream socket. A read never asks for more than the rest of the header
// or of the payload, so a descriptor, which the kernel ties to the first byte of its header, is
// always received with the frame that it belongs to.
#include "runtime/socket_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace tandem::runtime {
namespace {

// Memory for a payload is taken as it arrives, so that a length alone cannot make us allocate.
constexpr std::size_t kPayloadStep = std::size_t{1} << 20;

struct Received {
  ssize_t bytes;
  Descriptor descriptor;
  bool descriptor_lost;  // one was sent, and this process could not take it
};

Received receive_some(int fd, std::byte* destination, std::size_t size) {
  iovec vector{.iov_base = destination, .iov_len = size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t bytes = 0;
  do {
    bytes = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (bytes < 0 && errno == EINTR);
  Received received{.bytes = bytes, .descriptor = {}, .descriptor_lost = false};
  if (bytes < 0) return received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    // The control buffer has room for one descriptor, rounded up: padding may admit a second.
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int value = -1;
      std::memcpy(&value, CMSG_DATA(header) + i * sizeof(int), sizeof value);
      received.descriptor = Descriptor(value);
    }
  }
  received.descriptor_lost = (message.msg_flags & MSG_CTRUNC) != 0 && !received.descriptor;
  return received;
}

}  // namespace

bool wait_ready(int fd, short events, const Deadline& deadline) {
  for (;;) {
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int count = ::poll(&entry, 1, deadline.poll_timeout());
    if (count > 0) return true;
    if (deadline.passed()) return false;
  }
}

ChannelState Channel::receive(Frame& frame) {
  if (!socket_) return ChannelState::kClosed;
  auto* const header_bytes = reinterpret_cast<std::byte*>(&incoming_.header);
  for (;;) {
    const bool in_header = received_bytes_ < sizeof(FrameHeader);
    std::byte* destination = nullptr;
    std::size_t wanted = 0;
    if (in_header) {
      destination = header_bytes + received_bytes_;
      wanted = sizeof(FrameHeader) - received_bytes_;
    } else {
      const std::size_t position = received_bytes_ - sizeof(FrameHeader);
      if (position == incoming_.header.length) {
        frame = std::move(incoming_);
        incoming_ = {};
        received_bytes_ = 0;
        return ChannelState::kFrame;
      }
      if (incoming_.payload.size() == position) {
        incoming_.payload.resize(
            position + std::min<std::size_t>(incoming_.header.length - position, kPayloadStep));
      }
      wanted = incoming_.payload.size() - position;
      destination = incoming_.payload.data() + position;
    }
    Received received = receive_some(socket_.get(), destination, wanted);
    if (received.bytes < 0) {
      return errno == EAGAIN || errno == EWOULDBLOCK ? ChannelState::kPending
                                                     : ChannelState::kClosed;
    }
    if (received.bytes == 0) return ChannelState::kClosed;
    if (received.descriptor_lost) return ChannelState::kNoRoom;
    if (received.descriptor) incoming_.descriptor = std::move(received.descriptor);
    received_bytes_ += static_cast<std::size_t>(received.bytes);
    if (in_header && received_bytes_ == sizeof(FrameHeader) &&
        (incoming_.header.magic != kFrameMagic || incoming_.header.length > max_payload_)) {
      return ChannelState::kGarbled;
    }
  }
}

ChannelState Channel::receive_until(Frame& frame, const Deadline& deadline) {
  for (;;) {
    // A peer whose bytes drip in is looked at no longer than one that is silent.
    const ChannelState state = receive(frame);
    if (state != ChannelState::kPending || deadline.passed()) return state;
    static_cast<void>(wait_ready(socket_.get(), POLLIN, deadline));
  }
}

ChannelState Channel::send(FrameHeader header, std::span<const std::byte> payload, int descriptor,
                           const Deadline& deadline) {
  if (!socket_ || torn_) return ChannelState::kClosed;
  header.magic = kFrameMagic;
  header.length = payload.size();
  const std::size_t total = sizeof header + payload.size();
  std::size_t sent = 0;
  while (sent < total) {
    iovec vectors[2];
    int num_vectors = 0;
    if (sent < sizeof header) {
      vectors[num_vectors++] = {.iov_base = reinterpret_cast<std::byte*>(&header) + sent,
                                .iov_len = sizeof header - sent};
    }
    const std::size_t position = sent > sizeof header ? sent - sizeof header : 0;
    if (position < payload.size()) {
      vectors[num_vectors++] = {.iov_base = const_cast<std::byte*>(payload.data()) + position,
                                .iov_len = payload.size() - position};
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<std::size_t>(num_vectors);
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (descriptor >= 0 && sent == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    }
    const ssize_t count = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<std::size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // Not for ever with a peer that takes a little now and then.
      if (!deadline.passed() && wait_ready(socket_.get(), POLLOUT, deadline)) continue;
    } else if (errno == ETOOMANYREFS) {
      // As many descriptors are on their way as this user may have open; they become fewer as
      // peers receive theirs.
      if (!deadline.passed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
    } else {
      return ChannelState::kClosed;
    }
    torn_ = sent > 0;
    return ChannelState::kPending;
  }
  return ChannelState::kFrame;
}

std::optional<Channel::Peer> Channel::peer() const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return {};
  return Peer{.user = credentials.uid, .process = credentials.pid};
}

}  // namespace tandem::runtime
