// How the ranks of a communicator exchange small things while they set up: messages, descriptors of
// shared memory, or, within one process, pointers. Three implementations: threads of one process
// (thread_bootstrap.h), processes on one host over Unix-domain sockets (socket_bootstrap.h), and
// ranks on several hosts (backend/net/net_bootstrap.h).
//
// Every call that exchanges something is collective and bounded by timeout(): it
// throws kTimeout naming the ranks that did not come, or kPeerLost naming one whose process is
// gone. A rank that gives up has sent its part and tells the others. Whoever has everybody's part
// before it hears of that may pass the exchange; not the next, for which that rank sends none. So
// each rank is told in the exchange that failed or in the one after it: also one that comes late,
// after its peers have been told. It is never told in the one before, which is complete.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "runtime/descriptor.h"

namespace tandem::runtime {

class Network;

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual bool in_one_process() const = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;

  // The ranks that can share memory with this one, itself among them, ascending, and the bootstrap
  // of these alone, whose ranks are positions in that list.
  [[nodiscard]] virtual std::vector<int> host_ranks() const {
    std::vector<int> ranks(static_cast<std::size_t>(size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  [[nodiscard]] virtual Bootstrap& host() { return *this; }

  // The way to all other ranks; null where there are none.
  [[nodiscard]] virtual Network* network() { return nullptr; }

  [[nodiscard]] virtual std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) = 0;
  virtual void barrier() = 0;

  // Between processes: every rank's descriptor, duplicated into this process; by rank.
  [[nodiscard]] virtual std::vector<Descriptor> all_gather_descriptors(const Descriptor& own) = 0;

  // Within one process: every rank's object; by rank.
  [[nodiscard]] virtual std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void> own) = 0;
};

}  // namespace tandem::runtime
