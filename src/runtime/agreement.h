// Set-up steps that all ranks take together: either all succeed or all throw.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "runtime/bootstrap.h"
#include "runtime/failure.h"
#include "tandem/buffer.h"
#include "tandem/error.h"

namespace tandem::runtime {

// Collective: every rank says whether its part of a step went well. If one did not, all ranks throw
// the failure of the lowest rank that failed.
void agree(Bootstrap& bootstrap, const std::optional<Failure>& own);

// The same for an error that a rank's step has thrown: this rank throws it again, the others say
// whose it was.
void agree(Bootstrap& bootstrap, const std::optional<Error>& own);

// Collective. Runs `step` and returns its value if it succeeded on every rank.
template <typename Step>
auto agree(Bootstrap& bootstrap, Step&& step) -> decltype(step()) {
  std::optional<decltype(step())> value;
  std::optional<Error> error;
  try {
    value.emplace(step());
  } catch (const Error& caught) {
    error = caught;
  }
  agree(bootstrap, error);
  return std::move(*value);
}

// The options that must agree, as text.
std::string describe_options(const BufferOptions& options);

// Throws kMismatch, naming option and both values, unless those of `rank` agree with the text of
// those of `peer`.
void require_same_options(int peer, const std::string& theirs, int rank,
                          const BufferOptions& options);

// Collective. Throws kMismatch on every rank, naming option, rank and both values, unless the
// options that must agree do.
void require_same_options(Bootstrap& bootstrap, const BufferOptions& options);

}  // namespace tandem::runtime
