#include "backend/net/newcomer.h"

#include <memory>
#include <utility>

#include "backend/net/remote_link.h"

namespace tandem::net {

std::unique_ptr<runtime::RemotePeers> Newcomer::open(runtime::RemoteMemory memory) {
  const int num_ranks = memory.num_ranks;
  auto connections = std::make_shared<Connections>(rank_, num_ranks);
  connections->start(random_token());
  for (const Acquaintance& each : invitation_.book) {
    if (each.rank != rank_ && each.rank < num_ranks) connections->turn_to(each);
  }
  return std::make_unique<RemoteLink>(std::move(connections), invitation_.channel, num_ranks,
                                      std::move(memory), secret_);
}

}  // namespace tandem::net
