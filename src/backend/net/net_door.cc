#include "backend/net/net_door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "backend/net/socket_address.h"
#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

using runtime::Channel;
using runtime::ChannelState;
using runtime::Deadline;
using runtime::Descriptor;
using runtime::Failure;
using runtime::Frame;
using runtime::FrameKind;
using std::chrono::milliseconds;

// How long a visitor may take to ask, and how many may be at it: whoever reaches the port may open
// any number of connections and say nothing.
constexpr milliseconds kPatience{5000};
constexpr std::size_t kMaxVisits = 64;
// How long a visitor may take to accept its answer, most of which the system takes at once.
constexpr milliseconds kTellTimeout{200};
// Of those who are not known yet.
constexpr std::uint64_t kMaxSecretBytes = std::uint64_t{64} << 10;
// Between two visits where nobody opens yet, or it is not time yet.
constexpr milliseconds kVisitAgain{50};

runtime::FrameHeader header(FrameKind kind, int rank) {
  return {.magic = runtime::kFrameMagic,
          .kind = kind,
          .exchange = 0,
          .rank = static_cast<std::uint32_t>(rank),
          .round = runtime::kProtocolVersion,
          .deadline_ns = 0,
          .length = 0};
}

Descriptor make_socket(const SocketAddress& address) {
  Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw Error(ErrorCode::kResource, std::string("cannot create a socket: ") + strerror(errno));
  }
  return socket;
}

Descriptor listen_at(const std::string& text, const std::string& who) {
  const SocketAddress address = resolve(text, true);
  Descriptor socket = make_socket(address);
  // A door of before, closed by now, keeps nobody from the port.
  const int yes = 1;
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
  if (::bind(socket.get(), address.generic(), address.length) != 0 ||
      ::listen(socket.get(), static_cast<int>(kMaxVisits)) != 0) {
    throw Error(ErrorCode::kResource,
                who + " cannot listen at " + text + ": " + std::strerror(errno));
  }
  return socket;
}

// Empty if nobody listens there, or the way there is too long.
Channel connect_to(const SocketAddress& address, const Deadline& deadline) {
  Descriptor socket = make_socket(address);
  if (::connect(socket.get(), address.generic(), address.length) != 0) {
    if (errno != EINPROGRESS || !runtime::wait_ready(socket.get(), POLLOUT, deadline)) return {};
    int problem = 0;
    socklen_t length = sizeof problem;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &problem, &length) != 0 || problem != 0) {
      return {};
    }
  }
  return Channel(std::move(socket));
}

}  // namespace

NetDoor::NetDoor(const std::string& address, const std::string& secret, const std::string& who,
                 Invite invite)
    : secret_(secret),
      who_(who),
      invite_(std::move(invite)),
      listener_(listen_at(address, who)),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) throw Error(ErrorCode::kResource, "cannot create an event descriptor for a door");
  thread_ = std::thread([this] { serve(); });
}

NetDoor::~NetDoor() {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(stop_.get(), &one, sizeof one));
  thread_.join();
}

void NetDoor::serve() {
  for (;;) {
    const bool is_full = visits_.size() >= kMaxVisits;
    std::vector<pollfd> entries{
        {.fd = stop_.get(), .events = POLLIN, .revents = 0},
        {.fd = is_full ? -1 : listener_.get(), .events = POLLIN, .revents = 0}};
    Deadline deadline = Deadline::never();
    for (const Visit& visit : visits_) {
      entries.push_back({.fd = visit.channel.fd(), .events = POLLIN, .revents = 0});
      deadline = deadline.earlier_of(visit.deadline);
    }
    if (::poll(entries.data(), entries.size(), deadline.poll_timeout()) < 0) continue;
    if (entries[0].revents != 0) return;
    std::erase_if(visits_, [this](Visit& visit) { return look(visit); });
    if (entries[1].revents == 0) continue;
    Descriptor visitor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!visitor) {
      // No descriptor to serve it with: it waits, and others may have closed some by then.
      std::this_thread::sleep_for(milliseconds(10));
      continue;
    }
    visits_.push_back(
        {.channel = Channel(std::move(visitor)), .deadline = Deadline::after(kPatience)});
    visits_.back().channel.set_max_payload(kMaxSecretBytes);
  }
}

bool NetDoor::look(Visit& visit) const {
  Frame question;
  const ChannelState state = visit.channel.receive(question);
  if (state == ChannelState::kPending) return visit.deadline.passed();
  if (state != ChannelState::kFrame || question.header.kind != FrameKind::kQuestion) return true;
  FrameKind kind = FrameKind::kInvitation;
  std::vector<std::byte> text;
  try {
    text = answer(question);
  } catch (const Error& error) {
    kind = FrameKind::kFailure;
    text = runtime::encode({.info = error.info(), .message = error.message()});
  }
  // Whoever does not take it has gone away again.
  static_cast<void>(visit.channel.send(header(kind, 0), text, -1, Deadline::after(kTellTimeout)));
  return true;
}

std::vector<std::byte> NetDoor::answer(const Frame& question) const {
  if (!same_secret(secret_, question.payload)) {
    runtime::setup_failure(ErrorCode::kInvalidArgument, -1, who_ + " has another secret").raise();
  }
  if (question.header.round != runtime::kProtocolVersion) {
    runtime::setup_failure(ErrorCode::kMismatch, -1,
                           "the process that asks speaks version " +
                               std::to_string(question.header.round) + " of the protocol, " + who_ +
                               " version " + std::to_string(runtime::kProtocolVersion))
        .raise();
  }
  return invite_(static_cast<int>(question.header.rank));
}

std::vector<std::byte> visit_net_door(const std::string& address, const std::string& secret,
                                      int rank, milliseconds timeout) {
  const SocketAddress there = resolve(address, false);
  const auto start = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(timeout);
  Failure why =
      runtime::setup_failure(ErrorCode::kTimeout, -1, "nobody opens the door at " + address);
  for (;;) {
    Channel channel = connect_to(there, deadline);
    channel.set_max_payload(runtime::kMaxMessageBytes);
    Frame frame;
    const auto question = std::as_bytes(std::span(secret.data(), secret.size()));
    if (channel &&
        channel.send(header(FrameKind::kQuestion, rank), question, -1, deadline) ==
            ChannelState::kFrame &&
        channel.receive_until(frame, deadline) == ChannelState::kFrame) {
      if (frame.header.kind == FrameKind::kInvitation) return std::move(frame.payload);
      const auto refusal = runtime::decode_failure(frame.payload);
      if (refusal && refusal->info.code != ErrorCode::kTimeout) refusal->raise();
      if (refusal) why = *refusal;
    }
    if (deadline.passed()) {
      why.info.waited = Deadline::Clock::now() - start;
      why.info.limit = timeout;
      why.raise();
    }
    std::this_thread::sleep_for(kVisitAgain);
  }
}

}  // namespace tandem::net
