// Runs a body on every rank, as threads or processes, on this host or on several that are network
// namespaces, and brings home what each rank reported, also from ranks that died on the way.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::tools {

enum class Launch { kThreads, kProcesses, kApart, kHosts };

std::string_view name(Launch launch);
inline bool are_processes(Launch launch) { return launch != Launch::kThreads; }

// Called by a rank, any number of times.
using ReportFunction = std::function<void(const nlohmann::json&)>;
using RankBody = std::function<void(const Communicator&, const ReportFunction&)>;

struct RankOutcome {
  std::vector<nlohmann::json> reports = {};  // in the order they were made
  std::string error = {};  // why the rank ended before its time; empty if it did not
};

// `body` runs once per rank; unless ranks are threads in a forked child, so that it sees everything
// computed before the call without a copy, and nothing it writes is seen here but its reports. No
// thread may be running. kApart: processes on this host that share no memory. kHosts: rank r is on
// host r / (num_ranks / num_hosts), and the hosts are made and gone with this call; throws
// std::runtime_error saying what is lacking to make them.
std::vector<RankOutcome> run_ranks(Launch launch, int num_ranks, std::chrono::milliseconds timeout,
                                   const RankBody& body, int num_hosts = 1);

}  // namespace tandem::tools
