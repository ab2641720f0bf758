// A failure that one rank tells the others about, so that all of them throw the same error: the
// facts and the bare message of an Error, before its constructor composes the text.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/error.h"

namespace tandem::runtime {

struct Failure {
  ErrorInfo info;
  std::string message;

  [[noreturn]] void raise(std::source_location where = std::source_location::current()) const {
    throw Error(info, message, where);
  }
};

// May operations go on after this error, as nothing was sent or all ranks stopped alike?
bool leaves_buffer_sound(ErrorCode code);

// What a wait of this phase waits for its peer to do: "to begin this operation".
std::string_view awaited(Phase phase);

// A failure of set-up: phase kSetup, no operation.
Failure setup_failure(ErrorCode code, int peer, std::string message);

// kTimeout of a set-up exchange that lacks `missing`, named in the message; `what` says what they
// did not come to.
Failure missing_ranks_failure(std::span<const int> missing, int size, const std::string& what,
                              std::chrono::nanoseconds waited, std::chrono::nanoseconds limit);

// What a rank says of itself when it meets rank 0.
struct Claim {
  std::uint32_t version = 0;  // of the protocol
  std::int32_t rank = 0;
  std::int32_t size = 0;
};

// Why a rank that says `theirs` cannot be let in by rank 0, whose own claim is `own`;
// nothing if it can. `has_come(rank)`: has somebody else said so? `what` says where they meet.
std::optional<Failure> contradiction(const Claim& theirs, const Claim& own,
                                     const std::function<bool(int)>& has_come,
                                     const std::string& what);

// "rank 3", "ranks 0, 2 and 5"; the first 16 and the number of the others if there are many.
std::string list_ranks(std::span<const int> ranks);

// For the bootstrap's messages. decode refuses what encode cannot have written: nullopt.
std::vector<std::byte> encode(const Failure& failure);
std::optional<Failure> decode_failure(std::span<const std::byte> bytes);

}  // namespace tandem::runtime
