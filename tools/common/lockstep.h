// Ranks go through a test in steps: each does its part, then all meet and learn whether it went
// well everywhere. So a failure on one rank ends the step for all of them, none is left waiting,
// and no rank copies, allocates or synchronises while a peer has yet to launch the operation that
// it waits for (ranks that share a GPU would wait for each other for ever).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::tools {

class Lockstep {
 public:
  explicit Lockstep(const Communicator& communicator) : communicator_(communicator) {}

  // Runs `work` on this rank and waits for all ranks to have done so. False if it threw on any of
  // them; this rank's exception is then in errors(). Throws where a rank does not come at all.
  bool step(std::string_view what, const std::function<void()>& work);

  // The same for a step within the work of a step: throws on all ranks where it failed on any.
  void substep(std::string_view what, const std::function<void()>& work);

  // The largest of all ranks' values. Only where all ranks are sure to come: after a step that went
  // well.
  double largest(double value);

  // What went wrong here since the last call.
  std::vector<std::string> take_errors();

 private:
  const Communicator& communicator_;
  std::vector<std::string> errors_;
};

}  // namespace tandem::tools
