// Communicator: a bootstrap and the ways to come by one.
#include "tandem/communicator.h"

#include <algorithm>

#include "runtime/environment.h"
#include "runtime/failure.h"
#include "runtime/host_identity.h"
#include "runtime/local_socket.h"
#include "runtime/network.h"
#include "runtime/socket_bootstrap.h"

namespace tandem {

using runtime::Environment;

namespace {

[[noreturn]] void refuse_other_hosts(const std::vector<int>& elsewhere) {
  runtime::setup_failure(ErrorCode::kUnreachable, elsewhere.front(),
                         runtime::list_ranks(elsewhere) +
                             " cannot reach rank 0: on another host, or in a container with a "
                             "network of its own, and this build of the library has no network "
                             "(TANDEM_NET)")
      .raise();
}

}  // namespace

Communicator::Communicator(std::shared_ptr<runtime::Bootstrap> bootstrap)
    : bootstrap_(std::move(bootstrap)) {
  if (!bootstrap_) throw Error(ErrorCode::kInvalidArgument, "a Communicator needs a bootstrap");
}

Communicator Communicator::from_environment(const CommunicatorOptions& options) {
  const Environment environment = runtime::read_process_environment();
  if (!environment.address.empty()) {
    return connect_across_hosts(environment.address, environment.secret, environment.rank,
                                environment.size, options);
  }
  return connect(environment.name, environment.rank, environment.size, options);
}

Communicator Communicator::connect(const std::string& name, int rank, int size,
                                   const CommunicatorOptions& options) {
  return Communicator(runtime::connect_by_name(name, rank, size, options.timeout));
}

Communicator Communicator::from_all_gather(int rank, int size, const AllGather& all_gather,
                                           const CommunicatorOptions& options) {
  const auto introductions = runtime::introduce(rank, size, all_gather, options.share_memory);
  const std::vector<int> together = runtime::ranks_on_host_of(0, introductions);
  if (together.size() == introductions.size()) {
    return connect(introductions.front().name, rank, size, options);
  }
  if (runtime::network() == nullptr) {
    std::vector<int> elsewhere;
    for (int peer = 0; peer < size; ++peer) {
      if (!std::binary_search(together.begin(), together.end(), peer)) elsewhere.push_back(peer);
    }
    refuse_other_hosts(elsewhere);
  }
  runtime::validate_rank(rank, size, options.timeout);
  const std::vector<int> host_ranks = runtime::ranks_on_host_of(rank, introductions);
  return Communicator(runtime::network()->join({.rank = rank,
                                                .size = size,
                                                .timeout = options.timeout,
                                                .host_ranks = host_ranks,
                                                .host_name = introductions[host_ranks.front()].name,
                                                .secret = options.secret},
                                               all_gather));
}

Communicator Communicator::connect_across_hosts(const std::string& address,
                                                const std::string& secret, int rank, int size,
                                                const CommunicatorOptions& options) {
  runtime::validate_rank(rank, size, options.timeout);
  if (secret.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the secret is empty: whoever reaches the address could join");
  }
  if (runtime::network() == nullptr) {
    throw Error(
        ErrorCode::kUnsupported,
        "this build of the library has no network (TANDEM_NET), so no ranks on other hosts");
  }
  if (size == 1) return connect(runtime::random_rendezvous_name(), rank, size, options);
  // The connections of the meeting are closed once the ranks have others.
  CommunicatorOptions with_secret = options;
  with_secret.secret = secret;
  return from_all_gather(rank, size,
                         runtime::network()->meet(address, secret, rank, size, options.timeout),
                         with_secret);
}

int Communicator::rank() const { return bootstrap_->rank(); }

int Communicator::size() const { return bootstrap_->size(); }

std::vector<std::vector<std::byte>> Communicator::all_gather(
    std::span<const std::byte> message) const {
  return bootstrap_->all_gather(message);
}

void Communicator::barrier() const { bootstrap_->barrier(); }

}  // namespace tandem
