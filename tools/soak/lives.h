// The lives of one rank in a session of a soak: the first begins with all others; with faults it
// may be ended, and the next is another process, or thread, that joins in its place.
#pragma once

#include "soak/draw.h"
#include "soak/ledger.h"

namespace tandem::tools {

// Reports {"failure": text} for whatever was not to be, and what processes held as {"before":,
// "after":}.
void run_lives(const SessionPlan& plan, Ledger& ledger, const Communicator& communicator,
               const ReportFunction& report);

}  // namespace tandem::tools
