// The network of a process that becomes a rank of a running buffer: it connects to those who are
// there (net_door.h tells it who), without their communicator.
#pragma once

#include <string>

#include "backend/net/invitation.h"
#include "runtime/network.h"

namespace tandem::net {

class Newcomer final : public runtime::Network {
 public:
  Newcomer(int rank, std::string secret, Invitation invitation)
      : rank_(rank), secret_(std::move(secret)), invitation_(std::move(invitation)) {}

  [[nodiscard]] std::unique_ptr<runtime::RemotePeers> open(runtime::RemoteMemory memory) override;

 private:
  int rank_;
  std::string secret_;
  Invitation invitation_;
};

}  // namespace tandem::net
