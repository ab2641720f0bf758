// A link to one of the hosts that takes its time, each way. The kernels at hand have no netem: the
// switch's end of the link moves to a bridge of its own, and a process carries frames between that
// one and the switch, through two TAP devices. (A thread that allocates would leave locks behind in
// ranks that are forked beside it.)
#pragma once

#include <sys/types.h>

#include <chrono>

#include "common/network_hosts.h"

namespace tandem::test {

class DelayedLink {
 public:
  // Throws std::runtime_error. `hosts` lives longer.
  DelayedLink(const tools::NetworkHosts& hosts, int host, std::chrono::milliseconds delay);
  ~DelayedLink();  // the link is as it was
  DelayedLink(const DelayedLink&) = delete;
  DelayedLink& operator=(const DelayedLink&) = delete;

 private:
  const tools::NetworkHosts& hosts_;
  int host_;
  pid_t carrier_ = -1;
};

}  // namespace tandem::test
