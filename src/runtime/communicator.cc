// Communicator: a bootstrap and the ways to come by one.
#include "tandem/communicator.h"

#include <cstdlib>

#include "runtime/environment.h"
#include "runtime/host_identity.h"
#include "runtime/socket_bootstrap.h"

namespace tandem {

using runtime::Environment;

Communicator::Communicator(std::shared_ptr<runtime::Bootstrap> bootstrap)
    : bootstrap_(std::move(bootstrap)) {
  if (!bootstrap_) throw Error(ErrorCode::kInvalidArgument, "a Communicator needs a bootstrap");
}

Communicator Communicator::from_environment(const CommunicatorOptions& options) {
  const Environment environment = runtime::read_process_environment();
  return connect(environment.name, environment.rank, environment.size, options);
}

Communicator Communicator::connect(const std::string& name, int rank, int size,
                                   const CommunicatorOptions& options) {
  return Communicator(runtime::connect_by_name(name, rank, size, options.timeout));
}

Communicator Communicator::from_all_gather(int rank, int size, const AllGather& all_gather,
                                           const CommunicatorOptions& options) {
  const std::string name = runtime::meet_on_one_host(rank, size, all_gather);
  return connect(name, rank, size, options);
}

int Communicator::rank() const { return bootstrap_->rank(); }

int Communicator::size() const { return bootstrap_->size(); }

std::vector<std::vector<std::byte>> Communicator::all_gather(
    std::span<const std::byte> message) const {
  return bootstrap_->all_gather(message);
}

void Communicator::barrier() const { bootstrap_->barrier(); }

}  // namespace tandem
