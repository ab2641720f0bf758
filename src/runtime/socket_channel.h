// Frames over a stream socket: a fixed header, a payload, and, between processes of one host, at
// most one descriptor.
// Nothing that arrives is trusted: lengths are bounded before memory is taken for them, and a
// descriptor that nobody asked for is closed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/deadline.h"
#include "runtime/descriptor.h"

namespace tandem::runtime {

enum class FrameKind : std::uint32_t {
  kHello = 1,         // a rank presents itself: Hello
  kAccepted = 2,      // rank 0 has read the hello; it will send a welcome or a failure
  kWelcome = 3,       // everybody has come: Welcome
  kContribution = 4,  // a rank's part of an exchange
  kEntered = 5,       // rank 0 is in this exchange too; it will send the result or a failure
  kResult = 6,        // what everybody contributed
  kFailure = 7,       // an encoded Failure; the group has failed
  kOffer = 8,         // behind a door: what the buffer is like, and the descriptor of a block
  kBoard = 9,         // behind a door: the descriptor of the board
  kQuestion = 10,     // at a door of another host: the secret; who is to join
  kInvitation = 11,   // the answer, or kFailure
};

struct FrameHeader {
  std::uint32_t magic;
  FrameKind kind;
  std::uint32_t exchange;    // Exchange of a contribution or result
  std::uint32_t rank;        // of a result with a descriptor: whose it is
  std::uint64_t round;       // number of the exchange
  std::int64_t deadline_ns;  // until when the sender waits
  std::uint64_t length;      // of the payload, bytes
};
static_assert(sizeof(FrameHeader) == 40);

inline constexpr std::uint32_t kFrameMagic = 0x4d444e54;  // "TNDM"
inline constexpr std::uint32_t kProtocolVersion = 1;

// A message of one rank. The largest that the library itself sends is a few KiB; users gather
// messages of their own.
inline constexpr std::uint64_t kMaxMessageBytes = std::uint64_t{64} << 20;

struct Frame {
  FrameHeader header{};
  std::vector<std::byte> payload;
  Descriptor descriptor;
};

// What became of a step that does not wait.
enum class ChannelState {
  kPending,  // nothing more for now
  kFrame,    // a frame is complete
  kClosed,   // the peer is gone
  kGarbled,  // what came is no frame of this protocol
  kNoRoom,   // a descriptor came that this process has no room for
};

class Channel {
 public:
  Channel() = default;
  // Takes a connected, non-blocking socket.
  explicit Channel(Descriptor socket) : socket_(std::move(socket)) {}

  explicit operator bool() const { return static_cast<bool>(socket_); }
  [[nodiscard]] int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

  // The longest payload that receive() accepts from now on; longer ones are garbled.
  void set_max_payload(std::uint64_t bytes) { max_payload_ = bytes; }

  // Reads what is there, without waiting, up to the end of one frame: kFrame hands it over.
  [[nodiscard]] ChannelState receive(Frame& frame);

  // Waits for a frame: kPending if the deadline passed first.
  [[nodiscard]] ChannelState receive_until(Frame& frame, const Deadline& deadline);

  // Sends a frame: kFrame when it is on its way, kPending if the deadline passed first (then the
  // channel can send no more), kClosed if the peer is gone. `descriptor` is -1 for none.
  [[nodiscard]] ChannelState send(FrameHeader header, std::span<const std::byte> payload,
                                  int descriptor, const Deadline& deadline);

  // The user and process at the other end, as the kernel vouches for them.
  struct Peer {
    uid_t user;
    pid_t process;
  };
  [[nodiscard]] std::optional<Peer> peer() const;

 private:
  Descriptor socket_;
  bool torn_ = false;  // a frame was sent in part
  std::uint64_t max_payload_ = 4096;
  // The frame that is arriving.
  Frame incoming_;
  std::size_t received_bytes_ = 0;  // of header and payload
};

// Waits until `fd` is ready for `events` (poll.h), the peer has hung up, or the deadline passed
// (false).
bool wait_ready(int fd, short events, const Deadline& deadline);

}  // namespace tandem::runtime
