// In which settings a rank passes the points of the protocol, and the shapes that the tests use.
#pragma once

#include <vector>

#include "faults/script.h"
#include "support/scenario.h"

namespace tandem::test {

// What has to have happened for a rank to pass a point.
enum class Setting {
  kOperation,  // nothing: a pair of operations passes it
  kWait,       // peers that come late
  kLoss,       // another rank has left
  kTakeover,   // another rank has left between two words
  kRecovery,   // operations have failed
  kMasked,     // the rank has been masked
  kJoin,       // the rank joins a running buffer
  kLetIn,      // another rank joins
  kDoor,       // another rank knocks at this one's door
};

[[nodiscard]] Setting setting_of(Point point);
[[nodiscard]] std::vector<Point> points_of(Setting setting);

// Every rank needs every other. Packed or, with hooks, slotted.
[[nodiscard]] Shape entangled(int num_ranks, Placement placement);

}  // namespace tandem::test
