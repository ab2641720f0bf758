#include "support/hosts.h"

#include <cstdlib>
#include <iostream>
#include <stdexcept>

namespace tandem::test {

const tools::NetworkHosts& hosts() {
  try {
    static const tools::NetworkHosts all(4);
    return all;
  } catch (const std::runtime_error& error) {
    if (std::getenv("CI") == nullptr) std::cout << "not run: " << error.what() << std::endl;
    throw;
  }
}

std::string unused_address(int host) {
  static int port = 7000;
  return tools::NetworkHosts::address(host) + ":" + std::to_string(++port);
}

std::function<Communicator(int)> connect_on_hosts(int num_ranks, int num_hosts,
                                                  const CommunicatorOptions& options) {
  return connect_on_hosts(
      num_ranks, [num_hosts](int rank) { return rank % num_hosts; }, options);
}

std::function<Communicator(int)> connect_on_hosts(int num_ranks,
                                                  const std::function<int(int)>& place,
                                                  const CommunicatorOptions& options) {
  static_cast<void>(hosts());  // before anybody moves
  return [num_ranks, place, options, address = unused_address()](int rank) {
    hosts().enter(place(rank));
    return Communicator::connect_across_hosts(address, kSecret, rank, num_ranks, options);
  };
}

}  // namespace tandem::test
