// Three ranks with room for a fourth, which joins while they run: what the tests of ranks that fail
// on the way share.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "faults/script.h"
#include "faults/settings.h"
#include "support/party.h"

namespace tandem::test {

inline constexpr int kMembers = 3;
inline constexpr int kNewcomer = 3;  // the rank that joins
inline constexpr int kWitness = 1;   // the member that fails, where one does
inline constexpr int kHost = 0;      // the member behind whose door the newcomer finds the board
inline constexpr int kPairsTogether = 3;
// Gate: somebody was missed who did nothing wrong. The trial is void, and nobody waits any more.
inline constexpr int kStarved = 2;

struct Gathering {
  Shape shape = entangled(kMembers + 1, Placement::kPacked);
  Oracles oracles{shape};
  Common common;
  std::string name;
  BufferOptions options;

  explicit Gathering(std::chrono::nanoseconds timeout);
};

// The buffer of a member, and of whoever joins as `rank` (as soon as its predecessor has gone).
// Faults strike from the beginning.
[[nodiscard]] Buffer make_member(const Gathering& gathering, int rank, Script& script);
[[nodiscard]] Buffer join(const Gathering& gathering, int rank, Script& script);

// Runs pairs until this rank has seen some in which exactly `wanted` took part. Lets in whoever
// waits, if it is the first of those present; comes back itself if it has been masked.
// `after(present)` is called behind every pair, and with all but the one who was missed where that
// ended one with an error; false: give up.
void run_until(Rank& rank, Buffer& buffer, const Gathering& gathering, const Present& wanted,
               const std::function<bool(const Present&)>& after);

}  // namespace tandem::test
