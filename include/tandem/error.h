// tandem::Error: the one exception of the library. It says what failed, where, and who was missing.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tandem/types.h"

namespace tandem {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,  // an argument is wrong; nothing was sent
  kCapacity,         // the rows of this operation do not fit; every rank gets the same error
  kOrder,            // the call would wait for itself (a hook not run, both halves reserved)
  kStaleHandle,      // the handle's half was used again by a later dispatch
  kTimeout,          // a wait reached the buffer's timeout; `peer` is who was missing
  kMismatch,         // a peer calls another operation or with other arguments
  kUnreachable,      // peers cannot load from and store to each other's memory
  kUnsupported,      // not available here (backend not built, no device)
  kResource,         // the system refused memory, a descriptor, a thread or a process
  kPeerLost,         // a peer has ended or destroyed its end: during set-up, or while waited for
  kFailedBuffer,     // an earlier operation on this buffer failed; the message repeats its error
  kMasked,           // this rank has been masked by its peers; recover() lets it back
};

std::string_view name(ErrorCode code);

// The facts of an error. Fields that do not apply keep their defaults.
struct ErrorInfo {
  ErrorCode code = ErrorCode::kInvalidArgument;
  Operation operation = Operation::kNone;
  std::uint64_t epoch = 0;
  Phase phase = Phase::kNone;
  int peer = -1;                       // rank of the culprit, -1 if none
  std::int64_t expected = 0;           // what the wait or check wanted
  std::int64_t seen = 0;               // what it found
  std::chrono::nanoseconds waited{0};  // how long it waited
  std::chrono::nanoseconds limit{0};   // how long it was allowed to
};

class Error : public std::runtime_error {
 public:
  Error(const ErrorInfo& info, const std::string& message,
        std::source_location where = std::source_location::current());

  // An error of set-up or validation, which needs no more than a code and a message.
  Error(ErrorCode code, const std::string& message,
        std::source_location where = std::source_location::current())
      : Error(ErrorInfo{.code = code}, message, where) {}

  [[nodiscard]] const ErrorInfo& info() const noexcept { return info_; }
  // The bare message: what() has code and facts around it.
  [[nodiscard]] const std::string& message() const noexcept { return message_; }
  [[nodiscard]] ErrorCode code() const noexcept { return info_.code; }
  [[nodiscard]] int peer() const noexcept { return info_.peer; }
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

 private:
  ErrorInfo info_;
  std::string message_;
  std::source_location where_;
};

}  // namespace tandem
