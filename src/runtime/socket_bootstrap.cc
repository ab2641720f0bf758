// Exchanges through rank 0. A member sends its contribution; rank 0, once it is in the exchange
// too, says so (kEntered), gathers everybody's and sends all of them to all. Contributions carry
// the time until which their senders wait: rank 0 gives up at the earliest of them and tells
// everybody who was missing. A member that knows rank 0 to be there waits a little longer for that
// verdict.
#include "runtime/socket_bootstrap.h"

#include <fcntl.h>
#include <poll.h>

#include <cerrno>
#include <cstring>

namespace tandem::runtime {
namespace {

std::vector<std::byte> join(const std::vector<std::vector<std::byte>>& messages) {
  std::size_t total = 0;
  for (const auto& message : messages) total += sizeof(std::uint64_t) + message.size();
  std::vector<std::byte> joined;
  joined.reserve(total);
  for (const auto& message : messages) {
    const std::uint64_t length = message.size();
    const auto* const bytes = reinterpret_cast<const std::byte*>(&length);
    joined.insert(joined.end(), bytes, bytes + sizeof length);
    joined.insert(joined.end(), message.begin(), message.end());
  }
  return joined;
}

// Inverse of join; nullopt if `bytes` do not hold exactly `count` messages.
std::optional<std::vector<std::vector<std::byte>>> split(std::span<const std::byte> bytes,
                                                         int count) {
  std::vector<std::vector<std::byte>> messages;
  messages.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    std::uint64_t length = 0;
    if (bytes.size() < sizeof length) return {};
    std::memcpy(&length, bytes.data(), sizeof length);
    bytes = bytes.subspan(sizeof length);
    if (length > bytes.size()) return {};
    messages.emplace_back(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    bytes = bytes.subspan(length);
  }
  if (!bytes.empty()) return {};
  return messages;
}

}  // namespace

SocketBootstrap::SocketBootstrap(int rank, int size, std::chrono::milliseconds timeout,
                                 std::vector<Channel> channels)
    : rank_(rank), size_(size), timeout_(timeout), channels_(std::move(channels)) {
  const std::uint64_t longest =
      rank == 0 ? kMaxMessageBytes
                : (kMaxMessageBytes + sizeof(std::uint64_t)) * static_cast<std::uint64_t>(size);
  for (Channel& channel : channels_) channel.set_max_payload(longest);
}

std::vector<std::vector<std::byte>> SocketBootstrap::all_gather(
    std::span<const std::byte> message) {
  return exchange(Exchange::kMessages, message, -1).messages;
}

void SocketBootstrap::barrier() { static_cast<void>(exchange(Exchange::kBarrier, {}, -1)); }

std::vector<Descriptor> SocketBootstrap::all_gather_descriptors(const Descriptor& own) {
  if (!own) throw Error(ErrorCode::kInvalidArgument, "all_gather_descriptors needs a descriptor");
  return exchange(Exchange::kDescriptors, {}, own.get()).descriptors;
}

std::vector<std::shared_ptr<void>> SocketBootstrap::all_gather_objects(
    std::shared_ptr<void> /*own*/) {
  throw Error(ErrorCode::kUnsupported, "objects cannot be shared between processes");
}

SocketBootstrap::Exchanged SocketBootstrap::exchange(Exchange kind,
                                                     std::span<const std::byte> message,
                                                     int descriptor) {
  if (failure_) failure_->raise();
  if (message.size() > kMaxMessageBytes) {
    throw Error(ErrorCode::kInvalidArgument, "a message of " + std::to_string(message.size()) +
                                                 " bytes exceeds the limit of " +
                                                 std::to_string(kMaxMessageBytes));
  }
  ++round_;
  return rank_ == 0 ? exchange_as_root(kind, message, descriptor)
                    : exchange_as_member(kind, message, descriptor);
}

SocketBootstrap::Exchanged SocketBootstrap::exchange_as_root(Exchange kind,
                                                             std::span<const std::byte> message,
                                                             int descriptor) {
  const Deadline deadline = Deadline::after(timeout_);
  for (int peer = 1; peer < size_; ++peer) {
    const FrameHeader entered{.magic = kFrameMagic,
                              .kind = FrameKind::kEntered,
                              .exchange = static_cast<std::uint32_t>(kind),
                              .rank = 0,
                              .round = round_,
                              .deadline_ns = deadline.nanoseconds(),
                              .length = 0};
    // A peer that is gone shows when its contribution is read.
    static_cast<void>(channels_[peer].send(entered, {}, -1, deadline));
  }
  std::vector<Frame> contributions = gather(kind, deadline);

  Exchanged all;
  all.messages.reserve(contributions.size());
  all.messages.emplace_back(message.begin(), message.end());
  for (int peer = 1; peer < size_; ++peer) {
    all.messages.push_back(std::move(contributions[peer].payload));
  }
  if (kind == Exchange::kDescriptors) {
    all.descriptors.reserve(contributions.size());
    all.descriptors.emplace_back(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!all.descriptors.front()) {
      fail(setup_failure(
          ErrorCode::kResource, 0,
          std::string("rank 0 cannot duplicate a descriptor: ") + std::strerror(errno)));
    }
    for (int peer = 1; peer < size_; ++peer) {
      all.descriptors.push_back(std::move(contributions[peer].descriptor));
    }
  }
  distribute(kind, all, deadline);
  return all;
}

std::vector<Frame> SocketBootstrap::gather(Exchange kind, Deadline deadline) {
  const auto start = Deadline::Clock::now();
  std::vector<Frame> contributions(static_cast<std::size_t>(size_));
  std::vector<pollfd> entries(static_cast<std::size_t>(size_ - 1));
  for (int peer = 1; peer < size_; ++peer) {
    entries[peer - 1] = {.fd = channels_[peer].fd(), .events = POLLIN, .revents = 0};
  }
  const auto has_come = [&contributions](int peer) {
    return contributions[peer].header.magic == kFrameMagic;
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int peer = 1; peer < size_; ++peer) {
      if (!has_come(peer)) ranks.push_back(peer);
    }
    return ranks;
  };
  while (!missing().empty()) {
    const int num_ready = ::poll(entries.data(), entries.size(), deadline.poll_timeout());
    for (int peer = 1; peer < size_ && num_ready > 0; ++peer) {
      if (entries[peer - 1].revents == 0) continue;
      Frame frame;
      ChannelState state = channels_[peer].receive(frame);
      while (state == ChannelState::kFrame) {
        deadline = deadline.earlier_of(Deadline::from_nanoseconds(frame.header.deadline_ns));
        take_contribution(kind, peer, std::move(frame), contributions);
        frame = {};
        state = channels_[peer].receive(frame);
      }
      if (state == ChannelState::kClosed) fail(lost(peer, "is gone"));
      if (state == ChannelState::kGarbled) fail(lost(peer, "sent what is no message of Tandem"));
      if (state == ChannelState::kNoRoom) fail(no_room());
    }
    // Also where peers keep sending parts of what they should.
    if (deadline.passed() && !missing().empty()) {
      const auto waited = Deadline::Clock::now() - start;
      fail(missing_ranks_failure(missing(), size_, name(kind), waited, timeout_));
    }
  }
  return contributions;
}

void SocketBootstrap::take_contribution(Exchange kind, int peer, Frame frame,
                                        std::vector<Frame>& contributions) {
  if (frame.header.kind == FrameKind::kFailure) {
    if (auto failure = decode_failure(frame.payload)) fail(std::move(*failure));
  }
  if (frame.header.kind != FrameKind::kContribution || frame.header.round != round_ ||
      contributions[peer].header.magic == kFrameMagic) {
    fail(lost(peer, "sent a message out of turn"));
  }
  const auto seen = static_cast<Exchange>(frame.header.exchange);
  if (seen != kind) fail(exchange_mismatch(peer, seen, 0, kind));
  if (kind == Exchange::kDescriptors && !frame.descriptor) {
    fail(lost(peer, "sent no descriptor where one was due"));
  }
  contributions[peer] = std::move(frame);
}

void SocketBootstrap::distribute(Exchange kind, const Exchanged& all, const Deadline& deadline) {
  const std::vector<std::byte> payload =
      kind == Exchange::kMessages ? join(all.messages) : std::vector<std::byte>{};
  std::vector<int> not_reading;
  for (int peer = 1; peer < size_; ++peer) {
    // A peer that died since is for the next exchange to report: this one is complete.
    if (send_result(peer, kind, all, payload, deadline) == ChannelState::kPending) {
      not_reading.push_back(peer);
    }
  }
  if (!not_reading.empty()) {
    fail(missing_ranks_failure(not_reading, size_, std::string("the end of ") + name(kind),
                               timeout_, timeout_));
  }
}

ChannelState SocketBootstrap::send_result(int peer, Exchange kind, const Exchanged& all,
                                          std::span<const std::byte> payload,
                                          const Deadline& deadline) {
  FrameHeader header{.magic = kFrameMagic,
                     .kind = FrameKind::kResult,
                     .exchange = static_cast<std::uint32_t>(kind),
                     .rank = 0,
                     .round = round_,
                     .deadline_ns = deadline.nanoseconds(),
                     .length = 0};
  if (kind != Exchange::kDescriptors) return channels_[peer].send(header, payload, -1, deadline);
  for (int owner = 0; owner < size_; ++owner) {
    header.rank = static_cast<std::uint32_t>(owner);
    const ChannelState state =
        channels_[peer].send(header, {}, all.descriptors[owner].get(), deadline);
    if (state != ChannelState::kFrame) return state;
  }
  return ChannelState::kFrame;
}

SocketBootstrap::Exchanged SocketBootstrap::exchange_as_member(Exchange kind,
                                                               std::span<const std::byte> message,
                                                               int descriptor) {
  const auto start = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(timeout_);
  Channel& root = channels_.front();
  const auto missing_root = [&] {
    const int ranks[] = {0};
    return missing_ranks_failure(ranks, size_, name(kind), Deadline::Clock::now() - start,
                                 timeout_);
  };
  const FrameHeader header{.magic = kFrameMagic,
                           .kind = FrameKind::kContribution,
                           .exchange = static_cast<std::uint32_t>(kind),
                           .rank = static_cast<std::uint32_t>(rank_),
                           .round = round_,
                           .deadline_ns = deadline.nanoseconds(),
                           .length = 0};
  // If rank 0 is gone, what it said last may still be there to read.
  if (root.send(header, message, descriptor, deadline) == ChannelState::kPending) {
    fail(missing_root());
  }

  Exchanged all;
  bool root_is_here = false;
  for (;;) {
    Frame frame;
    switch (
        root.receive_until(frame, root_is_here ? deadline.extended_by(kVerdictGrace) : deadline)) {
      case ChannelState::kPending:
        fail(missing_root());
      case ChannelState::kClosed:
        fail(lost(0, "is gone"));
      case ChannelState::kGarbled:
        fail(lost(0, "sent what is no message of Tandem"));
      case ChannelState::kNoRoom:
        fail(no_room());
      case ChannelState::kFrame:
        break;
    }
    if (frame.header.kind == FrameKind::kFailure) {
      if (auto failure = decode_failure(frame.payload)) fail(std::move(*failure));
    }
    if (frame.header.kind == FrameKind::kEntered && frame.header.round == round_ && !root_is_here) {
      root_is_here = true;
      continue;
    }
    if (frame.header.kind != FrameKind::kResult || frame.header.round != round_) {
      fail(lost(0, "sent a message out of turn"));
    }
    if (kind == Exchange::kMessages) {
      auto messages = split(frame.payload, size_);
      if (!messages) fail(lost(0, "sent what is no result of all_gather"));
      all.messages = std::move(*messages);
      return all;
    }
    if (kind != Exchange::kDescriptors) return all;
    if (frame.header.rank != all.descriptors.size() || !frame.descriptor) {
      fail(lost(0, "sent what is no result of all_gather_descriptors"));
    }
    all.descriptors.push_back(std::move(frame.descriptor));
    if (static_cast<int>(all.descriptors.size()) == size_) return all;
  }
}

void SocketBootstrap::fail(Failure failure) {
  const std::vector<std::byte> payload = encode(failure);
  const FrameHeader header{.magic = kFrameMagic,
                           .kind = FrameKind::kFailure,
                           .exchange = 0,
                           .rank = static_cast<std::uint32_t>(rank_),
                           .round = round_,
                           .deadline_ns = 0,
                           .length = 0};
  const Deadline deadline = Deadline::after(kTellTimeout);
  for (Channel& channel : channels_) {
    static_cast<void>(channel.send(header, payload, -1, deadline));
  }
  failure_ = std::move(failure);
  failure_->raise();
}

Failure SocketBootstrap::no_room() const {
  return setup_failure(ErrorCode::kResource, rank_,
                       "rank " + std::to_string(rank_) +
                           " has no room for a peer's descriptor: raise the limit of open files "
                           "(ulimit -n)");
}

Failure SocketBootstrap::lost(int peer, const std::string& how) const {
  std::string text = "rank " + std::to_string(peer);
  if (const auto credentials = channels_[peer].peer()) {
    text += " (process " + std::to_string(credentials->process) + ")";
  }
  return setup_failure(ErrorCode::kPeerLost, peer, text + " " + how);
}

}  // namespace tandem::runtime
