// Which host this process is on, and what ranks say of it when they meet through a gathering
// function of the caller: "tandem <identity> <rendezvous name>".
#include "runtime/host_identity.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

#include "runtime/failure.h"
#include "runtime/socket_bootstrap.h"
#include "tandem/types.h"

namespace tandem::runtime {
namespace {

struct Introduction {
  std::string identity;
  std::string name;
};

Introduction parse(int rank, const std::vector<std::byte>& message) {
  std::istringstream text(
      std::string(reinterpret_cast<const char*>(message.data()), message.size()));
  std::string magic;
  Introduction introduction;
  if (!(text >> magic >> introduction.identity >> introduction.name) || magic != "tandem") {
    throw Error(ErrorCode::kInvalidArgument, "all_gather returned something else for rank " +
                                                 std::to_string(rank) +
                                                 " than that rank's message");
  }
  return introduction;
}

}  // namespace

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char network[64] = {};
  const ssize_t length = ::readlink("/proc/self/ns/net", network, sizeof network - 1);
  return (boot.empty() ? "unknown" : boot) + "/" +
         (length > 0 ? std::string(network, static_cast<std::size_t>(length)) : "unknown");
}

std::string meet_on_one_host(int rank, int size, const Communicator::AllGather& all_gather) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                 std::to_string(size) +
                                                 ": size must be from 1 to " +
                                                 std::to_string(kMaxRanks) + ", rank in [0, size)");
  }
  const std::string text = "tandem " + host_identity() + " " + random_rendezvous_name();
  const auto messages = all_gather(std::as_bytes(std::span(text.data(), text.size())));
  if (messages.size() != static_cast<std::size_t>(size)) {
    throw Error(ErrorCode::kInvalidArgument,
                "all_gather returned " + std::to_string(messages.size()) + " messages for " +
                    std::to_string(size) + " ranks");
  }
  const Introduction root = parse(0, messages[0]);
  std::vector<int> elsewhere;
  for (int peer = 1; peer < size; ++peer) {
    if (parse(peer, messages[peer]).identity != root.identity) elsewhere.push_back(peer);
  }
  if (!elsewhere.empty()) {
    setup_failure(ErrorCode::kUnreachable, elsewhere.front(),
                  list_ranks(elsewhere) +
                      " cannot reach rank 0: on another host, or in a container with a network "
                      "of its own")
        .raise();
  }
  return root.name;
}

}  // namespace tandem::runtime
