// Several hosts on this machine, for tests: network namespaces, which only root may make. Where
// they cannot be made the test fails, saying so; outside CI ctest counts it as skipped.
#pragma once

#include <functional>
#include <string>

#include "common/network_hosts.h"
#include "tandem/communicator.h"

namespace tandem::test {

// Four hosts, made when they are first asked for, that live as long as this process.
[[nodiscard]] const tools::NetworkHosts& hosts();

// An address on that host that nobody has used.
[[nodiscard]] std::string unused_address(int host = 0);

inline constexpr const char* kSecret = "secret of a test";

// For run_processes: rank r on host r % num_hosts, so that neighbours in rank are strangers and
// some hosts have more ranks than others; or on the host that `place` says.
[[nodiscard]] std::function<Communicator(int)> connect_on_hosts(
    int num_ranks, int num_hosts, const CommunicatorOptions& options = {});
[[nodiscard]] std::function<Communicator(int)> connect_on_hosts(
    int num_ranks, const std::function<int(int)>& place, const CommunicatorOptions& options = {});

}  // namespace tandem::test
