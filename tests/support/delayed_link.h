// A link to one of the hosts that takes its time, each way. The kernels at hand have no netem: the
// switch's end of the link moves to a bridge of its own, and a thread carries frames between that
// one and the switch, through two TAP devices.
#pragma once

#include <chrono>
#include <thread>

#include "common/network_hosts.h"
#include "runtime/descriptor.h"

namespace tandem::test {

class DelayedLink {
 public:
  // Throws std::runtime_error. `hosts` lives longer.
  DelayedLink(const tools::NetworkHosts& hosts, int host, std::chrono::milliseconds delay);
  ~DelayedLink();  // the link is as it was
  DelayedLink(const DelayedLink&) = delete;
  DelayedLink& operator=(const DelayedLink&) = delete;

 private:
  void carry() const;

  const tools::NetworkHosts& hosts_;
  int host_;
  std::chrono::milliseconds delay_;
  runtime::Descriptor ends_[2];  // of the TAP devices
  runtime::Descriptor stop_;     // an eventfd
  std::thread thread_;
};

}  // namespace tandem::test
