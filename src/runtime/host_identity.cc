// Which host this process is on, and what ranks say of it when they meet through a gathering
// function of the caller: "tandem <identity> <rendezvous name>".
#include "runtime/host_identity.h"

#include <unistd.h>

#include <fstream>
#include <sstream>

#include "runtime/local_socket.h"
#include "runtime/socket_bootstrap.h"
#include "tandem/types.h"

namespace tandem::runtime {
namespace {

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

std::vector<Introduction> introduce(int rank, int size, const Communicator::AllGather& all_gather,
                                    bool shares_memory) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                                 std::to_string(size) +
                                                 ": size must be from 1 to " +
                                                 std::to_string(kMaxRanks) + ", rank in [0, size)");
  }
  const std::string own_host = shares_memory ? "" : "/rank-" + std::to_string(rank);
  const std::string text = "tandem " + host_identity() + own_host + " " + random_rendezvous_name();
  const auto messages = all_gather(std::as_bytes(std::span(text.data(), text.size())));
  if (messages.size() != static_cast<std::size_t>(size)) {
    throw Error(ErrorCode::kInvalidArgument,
                "all_gather returned " + std::to_string(messages.size()) + " messages for " +
                    std::to_string(size) + " ranks");
  }
  std::vector<Introduction> introductions;
  for (int peer = 0; peer < size; ++peer) introductions.push_back(parse(peer, messages[peer]));
  return introductions;
}

std::vector<int> ranks_on_host_of(int rank, const std::vector<Introduction>& introductions) {
  std::vector<int> ranks;
  for (std::size_t peer = 0; peer < introductions.size(); ++peer) {
    if (introductions[peer].identity == introductions[rank].identity) {
      ranks.push_back(static_cast<int>(peer));
    }
  }
  return ranks;
}

}  // namespace tandem::runtime
