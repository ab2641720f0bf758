// How processes of one host find each other: rank 0 listens on an abstract Unix-domain socket, the
// others connect and present themselves, and when all have come rank 0 stops listening and welcomes
// them. The kernel vouches for the user at the other end, on both sides.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "runtime/local_socket.h"
#include "runtime/socket_bootstrap.h"
#include "runtime/thread_bootstrap.h"

namespace tandem::runtime {
namespace {

using std::chrono::milliseconds;

// After a contradiction rank 0 stays this long, or its timeout if that is shorter, to tell those
// who are about to come.
constexpr milliseconds kLinger{1000};
// Connections that have not said who they are; more have to queue.
constexpr std::size_t kMaxStrangers = 256;

struct Hello {
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t padding;
};

struct Welcome {
  // To ranks of rank 0's own process: a std::shared_ptr<ThreadGroup>* that becomes the receiver's.
  // Otherwise 0.
  std::uint64_t group;
};

// What both sides know of a meeting.
struct Meeting {
  std::string name;
  int rank;
  int size;
  milliseconds timeout;
  Deadline::Clock::time_point start = Deadline::Clock::now();
  Deadline deadline = Deadline::after(timeout);

  [[nodiscard]] std::string what() const { return "the rendezvous '" + name + "'"; }
  [[nodiscard]] Failure missing(std::span<const int> ranks) const {
    return missing_ranks_failure(ranks, size, what(), Deadline::Clock::now() - start, timeout);
  }
  [[nodiscard]] FrameHeader header(FrameKind kind) const {
    return {.magic = kFrameMagic,
            .kind = kind,
            .exchange = 0,
            .rank = static_cast<std::uint32_t>(rank),
            .round = 0,
            .deadline_ns = deadline.nanoseconds(),
            .length = 0};
  }
};

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// The listening side.
class Host {
 public:
  Host(Meeting meeting, Descriptor listener)
      : meeting_(std::move(meeting)),
        listener_(std::move(listener)),
        members_(static_cast<std::size_t>(meeting_.size)) {}

  std::shared_ptr<Bootstrap> gather() {
    while (num_members_ < meeting_.size - 1) {
      step(meeting_.deadline);
      if (meeting_.deadline.passed() && num_members_ < meeting_.size - 1) {
        std::vector<int> missing;
        for (int rank = 1; rank < meeting_.size; ++rank) {
          if (!members_[rank]) missing.push_back(rank);
        }
        fail(meeting_.missing(missing));
      }
    }
    // The name is free again before anybody can act on the welcome.
    listener_.reset();
    strangers_.clear();
    return welcome();
  }

 private:
  // Waits for events, until the deadline, and handles those that have come.
  void step(const Deadline& deadline) {
    std::vector<pollfd> entries;
    entries.push_back({.fd = strangers_.size() < kMaxStrangers ? listener_.get() : -1,
                       .events = POLLIN,
                       .revents = 0});
    for (const Channel& stranger : strangers_) {
      entries.push_back({.fd = stranger.fd(), .events = POLLIN, .revents = 0});
    }
    const std::size_t first_member = entries.size();
    for (const Channel& member : members_) {
      entries.push_back({.fd = member.fd(), .events = POLLIN, .revents = 0});
    }
    if (::poll(entries.data(), entries.size(), deadline.poll_timeout()) <= 0) return;

    for (std::size_t rank = 1; rank < members_.size(); ++rank) {
      if (entries[first_member + rank].revents != 0) hear_member(static_cast<int>(rank));
    }
    // From the back, so that removing one leaves the positions of the others to come.
    for (std::size_t i = strangers_.size(); i-- > 0;) {
      if (entries[1 + i].revents != 0) hear_stranger(i);
    }
    if (entries[0].revents != 0) accept_strangers();
  }

  void accept_strangers() {
    // A limited number at a time: those of other users, who are sent away at once, may be endless.
    for (std::size_t i = 0; i < kMaxStrangers && strangers_.size() < kMaxStrangers; ++i) {
      Channel stranger(
          Descriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
      if (!stranger) {
        const bool exhausted =
            errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        if (exhausted && !failure_) {
          fail(setup_failure(
              ErrorCode::kResource, 0,
              std::string("rank 0 cannot accept a connection: ") + std::strerror(errno)));
        }
        return;
      }
      const auto peer = stranger.peer();
      if (!peer || peer->user != ::geteuid()) continue;  // another user's: closed
      stranger.set_max_payload(sizeof(Hello));
      strangers_.push_back(std::move(stranger));
    }
  }

  void hear_stranger(std::size_t index) {
    Frame frame;
    const ChannelState state = strangers_[index].receive(frame);
    if (state == ChannelState::kPending) return;
    Channel stranger = std::move(strangers_[index]);
    strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(index));
    if (state == ChannelState::kClosed || state == ChannelState::kNoRoom) return;
    if (state == ChannelState::kGarbled || frame.header.kind != FrameKind::kHello ||
        frame.payload.size() != sizeof(Hello)) {
      // No rank of ours: it is told so and forgotten, and the others go on.
      tell(stranger, setup_failure(ErrorCode::kInvalidArgument, -1,
                                   "this is no message that ranks of Tandem greet with"));
      return;
    }
    Hello hello;
    std::memcpy(&hello, frame.payload.data(), sizeof hello);
    if (failure_) {
      tell(stranger, *failure_);
      note_told(hello.rank);
      return;
    }
    if (auto failure = contradiction(hello)) {
      tell(stranger, *failure);
      note_told(hello.rank);
      fail(std::move(*failure));
    }
    meeting_.deadline =
        meeting_.deadline.earlier_of(Deadline::from_nanoseconds(frame.header.deadline_ns));
    stranger.set_max_payload(kMaxMessageBytes);
    if (stranger.send(meeting_.header(FrameKind::kAccepted), {}, -1, meeting_.deadline) !=
        ChannelState::kFrame) {
      return;
    }
    members_[hello.rank] = std::move(stranger);
    ++num_members_;
  }

  // A member has nothing to say before its welcome, except that it gives up.
  void hear_member(int rank) {
    Frame frame;
    switch (members_[rank].receive(frame)) {
      case ChannelState::kPending:
        return;
      case ChannelState::kFrame:
        if (frame.header.kind == FrameKind::kFailure) {
          if (auto failure = decode_failure(frame.payload)) fail(std::move(*failure));
        }
        break;
      case ChannelState::kClosed:
      case ChannelState::kGarbled:
      case ChannelState::kNoRoom:
        break;
    }
    std::string process;
    if (const auto peer = members_[rank].peer()) {
      process = " (process " + std::to_string(peer->process) + ")";
    }
    fail(setup_failure(
        ErrorCode::kPeerLost, rank,
        "rank " + std::to_string(rank) + process + " left " + meeting_.what() + " before its end"));
  }

  [[nodiscard]] std::optional<Failure> contradiction(const Hello& hello) const {
    return runtime::contradiction(
        {.version = hello.version, .rank = hello.rank, .size = hello.size},
        {.version = kProtocolVersion, .rank = 0, .size = meeting_.size},
        [this](int rank) { return static_cast<bool>(members_[rank]); }, meeting_.what());
  }

  void tell(Channel& channel, const Failure& failure) const {
    static_cast<void>(channel.send(meeting_.header(FrameKind::kFailure), encode(failure), -1,
                                   Deadline::after(kTellTimeout)));
  }

  void note_told(int rank) {
    if (rank > 0 && rank < meeting_.size) told_[rank] = true;
  }

  // Tells everybody who has come and, for a while, those who come now: a rank that starts a little
  // later learns the same instead of waiting for its own timeout.
  [[noreturn]] void fail(Failure failure) {
    const bool missing_ones_were_waited_for = failure.info.code == ErrorCode::kTimeout;
    failure_ = std::move(failure);
    for (int rank = 1; rank < meeting_.size; ++rank) {
      if (!members_[rank]) continue;
      tell(members_[rank], *failure_);
      note_told(rank);
      members_[rank].close();
    }
    if (!missing_ones_were_waited_for) {
      const Deadline linger = Deadline::after(std::min(kLinger, meeting_.timeout));
      while (std::count(told_.begin() + 1, told_.end(), false) > 0 && !linger.passed()) {
        step(linger);
      }
    }
    failure_->raise();
  }

  std::shared_ptr<Bootstrap> welcome() {
    const bool one_process =
        std::all_of(members_.begin() + 1, members_.end(), [](const Channel& member) {
          const auto peer = member.peer();
          return peer && peer->process == ::getpid();
        });
    const auto group = one_process ? std::make_shared<ThreadGroup>(meeting_.size) : nullptr;
    for (int rank = 1; rank < meeting_.size; ++rank) {
      // The receiver's to delete. It is lost only if that thread gave up in this very moment.
      auto* const handed =
          one_process ? new std::shared_ptr<ThreadGroup>(group) : nullptr;  // NOLINT
      const Welcome message{.group = reinterpret_cast<std::uintptr_t>(handed)};
      if (members_[rank].send(meeting_.header(FrameKind::kWelcome), bytes_of(message), -1,
                              meeting_.deadline) != ChannelState::kFrame) {
        delete handed;
      }
    }
    if (one_process) return std::make_shared<ThreadBootstrap>(group, 0, meeting_.timeout);
    return std::make_shared<SocketBootstrap>(0, meeting_.size, meeting_.timeout,
                                             std::move(members_));
  }

  Meeting meeting_;
  Descriptor listener_;
  std::vector<Channel> strangers_;  // connected, not yet known
  std::vector<Channel> members_;    // by rank; rank 0's stays empty
  int num_members_ = 0;
  std::optional<Failure> failure_;
  std::vector<bool> told_ = std::vector<bool>(static_cast<std::size_t>(meeting_.size), false);
};

// Presents this rank to whoever listens; returns the channel if it was accepted. Empty: nobody
// there, or gone before it had heard us; try again.
Channel try_join(const Meeting& meeting) {
  Channel channel = try_connect(meeting.name, meeting.what());
  if (!channel) return {};
  const Hello hello{
      .version = kProtocolVersion, .rank = meeting.rank, .size = meeting.size, .padding = 0};
  channel.set_max_payload(std::uint64_t{1} << 16);
  // Even if it is gone, what it said last may be there to read.
  static_cast<void>(
      channel.send(meeting.header(FrameKind::kHello), bytes_of(hello), -1, meeting.deadline));
  Frame frame;
  if (channel.receive_until(frame, meeting.deadline) != ChannelState::kFrame) return {};
  if (frame.header.kind == FrameKind::kFailure) {
    if (const auto failure = decode_failure(frame.payload)) failure->raise();
  }
  if (frame.header.kind != FrameKind::kAccepted) {
    throw Error(ErrorCode::kMismatch, meeting.what() + " is held by something else than Tandem");
  }
  return channel;
}

// Between attempts to connect: nothing tells when a name comes into being.
class Backoff {
 public:
  void wait() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, milliseconds(20));
  }

 private:
  milliseconds pause_{1};
};

std::shared_ptr<Bootstrap> join_as_member(const Meeting& meeting) {
  const int root[] = {0};
  Channel channel;
  for (Backoff backoff; !(channel = try_join(meeting)); backoff.wait()) {
    if (meeting.deadline.passed()) meeting.missing(root).raise();
  }
  Frame frame;
  switch (channel.receive_until(frame, meeting.deadline.extended_by(kVerdictGrace))) {
    case ChannelState::kPending:
      meeting.missing(root).raise();
    case ChannelState::kClosed:
    case ChannelState::kGarbled:
    case ChannelState::kNoRoom:
      setup_failure(ErrorCode::kPeerLost, 0, "rank 0 left " + meeting.what() + " before its end")
          .raise();
    case ChannelState::kFrame:
      break;
  }
  if (frame.header.kind == FrameKind::kFailure) {
    if (const auto failure = decode_failure(frame.payload)) failure->raise();
  }
  Welcome welcome;
  if (frame.header.kind != FrameKind::kWelcome || frame.payload.size() != sizeof welcome) {
    throw Error(ErrorCode::kMismatch, "rank 0 sent no welcome to " + meeting.what());
  }
  std::memcpy(&welcome, frame.payload.data(), sizeof welcome);
  if (welcome.group != 0) {
    // Only our own process can mean an address of ours, and the kernel says whether it is.
    const auto peer = channel.peer();
    if (!peer || peer->process != ::getpid()) {
      throw Error(ErrorCode::kMismatch, "rank 0 sent the welcome of another process");
    }
    const std::unique_ptr<std::shared_ptr<ThreadGroup>> group(
        reinterpret_cast<std::shared_ptr<ThreadGroup>*>(welcome.group));
    return std::make_shared<ThreadBootstrap>(*group, meeting.rank, meeting.timeout);
  }
  std::vector<Channel> channels;
  channels.push_back(std::move(channel));
  return std::make_shared<SocketBootstrap>(meeting.rank, meeting.size, meeting.timeout,
                                           std::move(channels));
}

std::shared_ptr<Bootstrap> host(Meeting meeting) {
  for (Backoff backoff;; backoff.wait()) {
    if (Descriptor listener = try_listen(meeting.name, meeting.what())) {
      return Host(std::move(meeting), std::move(listener)).gather();
    }
    // Another rank 0 holds the name: it tells us, and its group, that this is a contradiction.
    // Unless it is just done with the name; then we try again.
    static_cast<void>(try_join(meeting));
    if (meeting.deadline.passed()) {
      throw Error(ErrorCode::kInvalidArgument,
                  meeting.what() + " is in use by another group of processes");
    }
  }
}

}  // namespace

void validate_rank(int rank, int size, milliseconds timeout) {
  if (size < 1 || size > kMaxRanks) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "size is " + std::to_string(size) + ", must be from 1 to " + std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument, "rank is " + std::to_string(rank) +
                                                 ", must be in [0, " + std::to_string(size) + ")");
  }
  if (timeout <= milliseconds::zero()) {
    throw Error(ErrorCode::kInvalidArgument,
                "timeout is " + std::to_string(timeout.count()) + " ms, must be positive");
  }
}

std::shared_ptr<Bootstrap> connect_by_name(const std::string& name, int rank, int size,
                                           milliseconds timeout) {
  validate_rank(rank, size, timeout);
  if (name.empty()) throw Error(ErrorCode::kInvalidArgument, "the rendezvous name is empty");
  if (size == 1) {
    return std::make_shared<ThreadBootstrap>(std::make_shared<ThreadGroup>(1), 0, timeout);
  }
  Meeting meeting{.name = name, .rank = rank, .size = size, .timeout = timeout};
  return rank == 0 ? host(std::move(meeting)) : join_as_member(meeting);
}

}  // namespace tandem::runtime
