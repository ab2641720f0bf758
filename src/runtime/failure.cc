// Failures as text and as bytes.
#include "runtime/failure.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tandem/types.h"

namespace tandem::runtime {
namespace {

constexpr std::size_t kMaxListedRanks = 16;
constexpr std::size_t kMaxMessageBytes = 16384;

// The fixed part of an encoded failure; the message follows.
struct EncodedFacts {
  std::int64_t expected;
  std::int64_t seen;
  std::int64_t waited_ns;
  std::int64_t limit_ns;
  std::uint64_t epoch;
  std::int32_t peer;
  std::uint8_t code;
  std::uint8_t operation;
  std::uint8_t phase;
  std::uint8_t padding;
};
static_assert(sizeof(EncodedFacts) == 48);

}  // namespace

bool leaves_buffer_sound(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kCapacity:
    case ErrorCode::kOrder:
    case ErrorCode::kStaleHandle:
      return true;
    default:
      return false;
  }
}

std::string_view awaited(Phase phase) {
  switch (phase) {
    case Phase::kEnter:
      return "to complete the operation before last";
    case Phase::kHeader:
      return "to begin this operation";
    case Phase::kRows:
      return "to finish writing rows";
    case Phase::kReady:
      return "to have expert outputs ready";
    case Phase::kCombineHalf:
      return "to finish reading the combine region that is to be reused";
    case Phase::kMembership:
      return "to take note that a rank has been lost";
    default:
      return "";
  }
}

Failure setup_failure(ErrorCode code, int peer, std::string message) {
  return {.info = {.code = code, .phase = Phase::kSetup, .peer = peer},
          .message = std::move(message)};
}

Failure missing_ranks_failure(std::span<const int> missing, int size, const std::string& what,
                              std::chrono::nanoseconds waited, std::chrono::nanoseconds limit) {
  return {.info = {.code = ErrorCode::kTimeout,
                   .phase = Phase::kSetup,
                   .peer = missing.empty() ? -1 : missing.front(),
                   .waited = waited,
                   .limit = limit},
          .message = list_ranks(missing) + " of " + std::to_string(size) + " did not come to " +
                     what + " in time"};
}

std::optional<Failure> contradiction(const Claim& theirs, const Claim& own,
                                     const std::function<bool(int)>& has_come,
                                     const std::string& what) {
  const std::string who = "rank " + std::to_string(theirs.rank);
  Failure failure = setup_failure(ErrorCode::kInvalidArgument, theirs.rank, "");
  if (theirs.version != own.version) {
    failure.info.code = ErrorCode::kMismatch;
    failure.info.expected = own.version;
    failure.info.seen = theirs.version;
    failure.message = who + " speaks version " + std::to_string(theirs.version) +
                      " of the protocol, rank 0 version " + std::to_string(own.version);
  } else if (theirs.size != own.size) {
    failure.info.expected = own.size;
    failure.info.seen = theirs.size;
    failure.message = who + " says that there are " + std::to_string(theirs.size) +
                      " ranks, rank 0 says " + std::to_string(own.size) + ", in " + what;
  } else if (theirs.rank < 0 || theirs.rank >= own.size) {
    failure.info.expected = own.size - 1;
    failure.info.seen = theirs.rank;
    failure.message = who + " is outside [0, " + std::to_string(own.size) + "), in " + what;
  } else if (theirs.rank == own.rank || has_come(theirs.rank)) {
    failure.message = "two processes say that they are " + who + " of " + what;
  } else {
    return {};
  }
  return failure;
}

std::string list_ranks(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const std::size_t listed = std::min(ranks.size(), kMaxListedRanks);
  for (std::size_t i = 0; i < listed; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (listed < ranks.size()) text += " and " + std::to_string(ranks.size() - listed) + " more";
  return text;
}

std::vector<std::byte> encode(const Failure& failure) {
  const EncodedFacts facts{.expected = failure.info.expected,
                           .seen = failure.info.seen,
                           .waited_ns = failure.info.waited.count(),
                           .limit_ns = failure.info.limit.count(),
                           .epoch = failure.info.epoch,
                           .peer = failure.info.peer,
                           .code = static_cast<std::uint8_t>(failure.info.code),
                           .operation = static_cast<std::uint8_t>(failure.info.operation),
                           .phase = static_cast<std::uint8_t>(failure.info.phase),
                           .padding = 0};
  const std::size_t length = std::min(failure.message.size(), kMaxMessageBytes);
  std::vector<std::byte> bytes(sizeof facts + length);
  std::memcpy(bytes.data(), &facts, sizeof facts);
  if (length > 0) std::memcpy(bytes.data() + sizeof facts, failure.message.data(), length);
  return bytes;
}

std::optional<Failure> decode_failure(std::span<const std::byte> bytes) {
  EncodedFacts facts;
  if (bytes.size() < sizeof facts || bytes.size() > sizeof facts + kMaxMessageBytes) return {};
  std::memcpy(&facts, bytes.data(), sizeof facts);
  if (facts.code > static_cast<std::uint8_t>(ErrorCode::kMasked) ||
      facts.operation > static_cast<std::uint8_t>(Operation::kCombine) ||
      facts.phase > static_cast<std::uint8_t>(Phase::kMembership) || facts.peer < -1 ||
      facts.peer >= kMaxRanks) {
    return {};
  }
  const auto text = bytes.subspan(sizeof facts);
  return Failure{.info = {.code = static_cast<ErrorCode>(facts.code),
                          .operation = static_cast<Operation>(facts.operation),
                          .epoch = facts.epoch,
                          .phase = static_cast<Phase>(facts.phase),
                          .peer = facts.peer,
                          .expected = facts.expected,
                          .seen = facts.seen,
                          .waited = std::chrono::nanoseconds(facts.waited_ns),
                          .limit = std::chrono::nanoseconds(facts.limit_ns)},
                 .message = std::string(reinterpret_cast<const char*>(text.data()), text.size())};
}

}  // namespace tandem::runtime
