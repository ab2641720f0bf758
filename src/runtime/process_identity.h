// Which process a rank is, so that its peers on this host can tell whether it is still there: a
// process number alone may have been given to another since.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::runtime {

struct ProcessIdentity {
  std::uint64_t process = 0;        // number, 0: unknown
  std::uint64_t start_time = 0;     // clock ticks since boot
  std::uint64_t pid_namespace = 0;  // in which the number counts

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

ProcessIdentity own_process();

// True only if it is certain: the process has ended, so none of its threads will ever write again.
// Where /proc does not say, or the process is of another pid namespace, false.
bool is_gone(const ProcessIdentity& process);

}  // namespace tandem::runtime
