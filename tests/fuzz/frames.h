// Frames as a broken or hostile process may send them down a socket.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <vector>

#include "fuzz/check.h"
#include "runtime/descriptor.h"
#include "runtime/socket_channel.h"

namespace tandem::fuzz {

using runtime::Descriptor;
using runtime::FrameHeader;
using runtime::FrameKind;

// Sends bytes and at most `num_descriptors` descriptors with the first of them, without waiting.
inline void send_bytes(int fd, const std::string& bytes, int num_descriptors) {
  constexpr int kMost = 3;
  iovec vector{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  const Descriptor file(num_descriptors > 0 ? ::memfd_create("fuzz", MFD_CLOEXEC) : -1);
  alignas(cmsghdr) char control[CMSG_SPACE(kMost * sizeof(int))] = {};
  if (file) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(num_descriptors * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(num_descriptors * sizeof(int));
    for (int i = 0; i < num_descriptors && i < kMost; ++i) {
      const int value = file.get();
      std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &value, sizeof value);
    }
  }
  static_cast<void>(::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

// A frame around `payload` whose header is right but for what `data` changes in it.
inline std::string frame(FuzzedDataProvider& data, FrameHeader header, const std::string& payload) {
  header.magic = runtime::kFrameMagic;
  header.length = payload.size();
  switch (data.ConsumeIntegralInRange(0, 9)) {
    case 0:
      header.magic = data.ConsumeIntegral<std::uint32_t>();
      break;
    case 1:
      header.kind = static_cast<FrameKind>(data.ConsumeIntegralInRange<std::uint32_t>(0, 9));
      break;
    case 2:
      header.exchange = awkward(data, header.exchange);
      break;
    case 3:
      header.rank = awkward(data, header.rank);
      break;
    case 4:
      header.round = awkward(data, header.round);
      break;
    case 5:
      header.deadline_ns = awkward(data, header.deadline_ns);
      break;
    case 6:
      header.length = awkward(data, header.length);
      break;
    default:
      break;
  }
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

}  // namespace tandem::fuzz
