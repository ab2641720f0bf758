// Exchanges over sockets once ranks have met: rank 0 with two peers whose messages are anything, or
// a member whose rank 0 says anything. An exchange returns or throws tandem::Error.
#include <memory>

#include "fuzz/frames.h"
#include "runtime/socket_bootstrap.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;
using runtime::Descriptor;
using runtime::Exchange;
using runtime::FrameKind;

constexpr std::uint64_t kMostRounds = 3;
constexpr std::chrono::milliseconds kTimeout{10};

std::string payload_of(FuzzedDataProvider& data, int num_ranks) {
  switch (data.ConsumeIntegralInRange(0, 3)) {
    case 0: {  // what an exchange of short messages returns, but for a length
      std::string joined;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::string part = data.ConsumeRandomLengthString(12);
        const auto length =
            data.ConsumeBool() ? part.size() : fuzz::awkward<std::uint64_t>(data, part.size());
        joined.append(reinterpret_cast<const char*>(&length), sizeof length);
        joined += part;
      }
      return joined;
    }
    case 1: {  // a failure that a peer has met
      runtime::Failure failure = runtime::setup_failure(ErrorCode::kResource, 1, "no memory");
      failure.info.expected = fuzz::awkward<std::int64_t>(data, 1);
      failure.info.waited = std::chrono::nanoseconds(fuzz::awkward<std::int64_t>(data, 1));
      failure.info.limit = std::chrono::nanoseconds(fuzz::awkward<std::int64_t>(data, 1));
      const auto bytes = runtime::encode(failure);
      std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      if (data.ConsumeBool()) text[data.ConsumeIntegralInRange<std::size_t>(0, 50)] = 77;
      return text;
    }
    case 2:
      return {};
    default:
      return data.ConsumeRandomLengthString(64);
  }
}

// All that a peer will ever say.
void say(FuzzedDataProvider& data, int fd, bool as_root, int num_ranks, Exchange kind) {
  const int num_frames = data.ConsumeIntegralInRange(0, 6);
  for (int i = 0; i < num_frames; ++i) {
    FrameKind frame_kind = as_root ? FrameKind::kResult : FrameKind::kContribution;
    if (data.ConsumeIntegralInRange(0, 7) == 0) frame_kind = FrameKind::kFailure;
    if (as_root && data.ConsumeIntegralInRange(0, 7) == 0) frame_kind = FrameKind::kEntered;
    const bool descriptors = kind == Exchange::kDescriptors;
    const runtime::FrameHeader header{
        .magic = 0,
        .kind = frame_kind,
        .exchange = static_cast<std::uint32_t>(kind),
        .rank = descriptors && as_root ? static_cast<std::uint32_t>(i % num_ranks) : 0,
        .round = descriptors && as_root ? 1U + i / num_ranks : 1U + i,
        .deadline_ns = runtime::Deadline::never().nanoseconds(),
        .length = 0};
    int num_descriptors = descriptors ? 1 : 0;
    if (data.ConsumeIntegralInRange(0, 9) == 0) {
      num_descriptors = data.ConsumeIntegralInRange(0, 3);
    }
    const std::string payload = descriptors ? std::string() : payload_of(data, num_ranks);
    std::string bytes = fuzz::frame(data, header, payload);
    if (data.ConsumeIntegralInRange(0, 15) == 0) {
      bytes.resize(data.ConsumeIntegralInRange<std::size_t>(1, bytes.size()));
    }
    fuzz::send_bytes(fd, bytes, num_descriptors);
  }
  // Now and then it stays, and says no more. (For a rank 0 that does, members wait for seconds.)
  if (as_root || data.ConsumeIntegralInRange(0, 31) > 0) ::shutdown(fd, SHUT_WR);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  const bool as_root = data.ConsumeBool();  // the peers are fuzzed: are they rank 0?
  const int num_ranks = data.ConsumeIntegralInRange(2, 3);
  const auto kind = static_cast<Exchange>(data.ConsumeIntegralInRange(0, 2));
  const int rank = as_root ? num_ranks - 1 : 0;

  std::vector<runtime::Channel> channels(as_root ? 1 : num_ranks);
  std::vector<Descriptor> others;
  for (std::size_t peer = as_root ? 0 : 1; peer < channels.size(); ++peer) {
    int ends[2];
    check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
          "there are sockets");
    channels[peer] = runtime::Channel(Descriptor(ends[0]));
    others.emplace_back(ends[1]);
    say(data, ends[1], as_root, num_ranks, kind);
  }
  runtime::SocketBootstrap bootstrap(rank, num_ranks, kTimeout, std::move(channels));
  const Descriptor own(::memfd_create("own", MFD_CLOEXEC));
  try {
    for (std::uint64_t round = 0; round < kMostRounds; ++round) {
      const std::size_t num = static_cast<std::size_t>(num_ranks);
      switch (kind) {
        case Exchange::kBarrier:
          bootstrap.barrier();
          break;
        case Exchange::kMessages:
          check(bootstrap.all_gather({}).size() == num, "a message of every rank");
          break;
        default:
          for (const Descriptor& got : bootstrap.all_gather_descriptors(own)) {
            check(static_cast<bool>(got), "a descriptor of every rank");
          }
      }
    }
  } catch (const Error& error) {
    check(error.peer() >= -1, "an error names a rank or none");
  }
  return 0;
}
