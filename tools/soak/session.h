// One rank's part in a session of a soak, for as long as it lives: pairs of operations until time
// is over, each judged; with faults it may be masked on the way, and comes back.
#pragma once

#include <cstdint>

#include "soak/draw.h"
#include "soak/ledger.h"

namespace tandem::tools {

// A thread's way to die.
struct Left {};

// From pair `first` on, together with `all` who begin the session with this rank (null where it
// joins). Reports {"failure": text} for whatever was not to be. Throws Left where the
// menace has it that a thread ends here.
void run_session(const SessionPlan& plan, Ledger& ledger, Buffer& buffer, std::int64_t first,
                 const Communicator* all, const ReportFunction& report);

}  // namespace tandem::tools
