// How the ranks of a communicator exchange small things while they set up: messages, descriptors of
// shared memory, or, within one process, pointers. Two implementations: threads of one process
// (thread_bootstrap.h), and processes on one host over Unix-domain sockets (socket_bootstrap.h).
//
// Every call but rank(), size() and in_one_process() is collective and bounded by timeout(): it
// throws kTimeout naming the ranks that did not come, or kPeerLost naming one whose process is
// gone.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "runtime/descriptor.h"

namespace tandem::runtime {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual bool in_one_process() const = 0;
  [[nodiscard]] virtual std::chrono::milliseconds timeout() const = 0;

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
