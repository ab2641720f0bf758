#include "runtime/door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/deadline.h"
#include "runtime/local_socket.h"
#include "tandem/error.h"
#include "tandem/types.h"

namespace tandem::runtime {
namespace {

// How long a visitor may take to accept what it came for.
constexpr std::chrono::milliseconds kPatience{1000};
// How long a visitor waits for whoever may have stopped behind its door.
constexpr std::chrono::milliseconds kLongestVisit{2000};

std::string address(const std::string& name, int rank) {
  return name + "/door/" + std::to_string(rank);
}

std::string what(const std::string& name, int rank) {
  return "the door of rank " + std::to_string(rank) + " of '" + name + "'";
}

FrameHeader header(FrameKind kind, int num_ranks) {
  return {.magic = kFrameMagic,
          .kind = kind,
          .exchange = 0,
          .rank = static_cast<std::uint32_t>(num_ranks),
          .round = kProtocolVersion,
          .deadline_ns = 0,
          .length = 0};
}

}  // namespace

Door::Door(const std::string& name, int rank, Seam seam)
    : listener_(try_listen(address(name, rank), what(name, rank))), seam_(seam) {
  if (!listener_) {
    throw Error(ErrorInfo{.code = ErrorCode::kOrder, .phase = Phase::kSetup, .peer = rank},
                what(name, rank) + " is open already: another process is that rank");
  }
}

Door::~Door() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(stop_.get(), &one, sizeof one));
  thread_.join();
}

void Door::open(Offer offer) {
  offer_ = std::move(offer);
  stop_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) throw Error(ErrorCode::kResource, "cannot create an event descriptor for a door");
  thread_ = std::thread([this] { serve(); });
}

void Door::serve() {
  for (;;) {
    std::array<pollfd, 2> entries{{{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = stop_.get(), .events = POLLIN, .revents = 0}}};
    if (::poll(entries.data(), entries.size(), -1) < 0) continue;
    if (entries[1].revents != 0) return;
    Channel visitor(
        Descriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
    if (!visitor) {
      // No descriptor to serve it with: it waits, and others may have closed some by then.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    const auto peer = visitor.peer();
    if (!peer || peer->user != ::geteuid()) continue;  // another user's: closed
    seam_.pass(Point::kVisitor);
    const Deadline deadline = Deadline::after(kPatience);
    const auto options = std::as_bytes(std::span(offer_.options));
    if (visitor.send(header(FrameKind::kOffer, offer_.num_ranks), options, offer_.block.get(),
                     deadline) == ChannelState::kFrame) {
      seam_.pass(Point::kBlockOffered);
      // Whoever does not take it has gone away again.
      static_cast<void>(visitor.send(header(FrameKind::kBoard, offer_.num_ranks), {},
                                     offer_.board.get(), deadline));
    }
  }
}

std::optional<Offer> visit_door(const std::string& name, int rank,
                                std::chrono::nanoseconds timeout) {
  const Deadline deadline = Deadline::after(
      std::min(kLongestVisit, std::chrono::ceil<std::chrono::milliseconds>(timeout / 2)));
  Channel channel = try_connect(address(name, rank), what(name, rank));
  if (!channel) return {};
  channel.set_max_payload(kMaxMessageBytes);
  Frame block;
  Frame board;
  if (channel.receive_until(block, deadline) != ChannelState::kFrame ||
      channel.receive_until(board, deadline) != ChannelState::kFrame) {
    return {};
  }
  if (block.header.kind != FrameKind::kOffer || board.header.kind != FrameKind::kBoard ||
      block.header.round != kProtocolVersion || !block.descriptor || !board.descriptor ||
      block.header.rank < 1 || block.header.rank > kMaxRanks) {
    throw Error(ErrorCode::kMismatch,
                what(name, rank) + " is held by something else, or another version of Tandem");
  }
  return Offer{.num_ranks = static_cast<int>(block.header.rank),
               .options = std::string(reinterpret_cast<const char*>(block.payload.data()),
                                      block.payload.size()),
               .block = std::move(block.descriptor),
               .board = std::move(board.descriptor)};
}

}  // namespace tandem::runtime
