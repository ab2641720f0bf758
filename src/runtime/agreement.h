// Set-up steps that all ranks take together: either all succeed or all throw.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "runtime/bootstrap.h"
#include "tandem/buffer.h"
#include "tandem/error.h"

namespace tandem::runtime {

// Exchanges this rank's error, if it has one. Throws it where there is one; on other ranks, throws
// the lowest failed rank's error under its own code, naming that rank.
void share_error(Bootstrap& bootstrap, const std::optional<Error>& own);

// Collective. Runs `step` and returns its value if it succeeded on every rank.
template <typename Step>
auto agree(Bootstrap& bootstrap, Step&& step) {
  std::optional<decltype(step())> value;
  std::optional<Error> error;
  try {
    value.emplace(step());
  } catch (const Error& caught) {
    error = caught;
  }
  share_error(bootstrap, error);
  return std::move(*value);
}

// Collective. Throws kMismatch on every rank, naming option, rank and both values, unless the
// options that must agree do.
void require_same_options(Bootstrap& bootstrap, const BufferOptions& options);

}  // namespace tandem::runtime
