// One rank's part in a session of a soak: pairs of operations until time is over, each judged; with
// faults it may be masked on the way, and comes back.
#pragma once

#include "soak/draw.h"
#include "soak/ledger.h"

namespace tandem::tools {

// Reports {"failure": text} for whatever was not to be.
void run_session(const SessionPlan& plan, Ledger& ledger, const Communicator& communicator,
                 const ReportFunction& report);

}  // namespace tandem::tools
