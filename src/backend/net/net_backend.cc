#include "backend/net/net_backend.h"

#include <ucp/api/ucp.h>

#include "backend/net/meeting.h"
#include "backend/net/net_bootstrap.h"
#include "backend/net/net_door.h"
#include "backend/net/newcomer.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

class UcxNetwork final : public runtime::NetworkInterface {
 public:
  [[nodiscard]] NetworkInfo info() const override {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned release = 0;
    ucp_get_version(&major, &minor, &release);
    return {.built = true,
            .library = std::string("UCX ") + ucp_get_version_string(),
            .bears_turnover = major > 1 || minor >= 14};  // docs/network.md has which bugs
  }

  [[nodiscard]] Communicator::AllGather meet(const std::string& address, const std::string& secret,
                                             int rank, int size,
                                             std::chrono::milliseconds timeout) const override {
    return net::meet(
        {.address = address, .secret = secret, .rank = rank, .size = size, .timeout = timeout});
  }

  [[nodiscard]] std::shared_ptr<runtime::Bootstrap> join(
      const runtime::Party& party, const Communicator::AllGather& all_gather) const override {
    return std::make_shared<NetBootstrap>(party, all_gather);
  }

  [[nodiscard]] runtime::Invitation visit(const std::string& address, const std::string& secret,
                                          int rank,
                                          std::chrono::milliseconds timeout) const override {
    auto invitation = decode_invitation(visit_net_door(address, secret, rank, timeout));
    if (!invitation) {
      throw Error(ErrorCode::kMismatch,
                  "at " + address + " is something else than a door of this version of Tandem");
    }
    std::vector<std::byte> situation = std::move(invitation->situation);
    return {.situation = std::move(situation),
            .network = std::make_shared<Newcomer>(rank, secret, std::move(*invitation))};
  }
};

}  // namespace

const runtime::NetworkInterface& network() {
  static const UcxNetwork instance;
  return instance;
}

}  // namespace tandem::net
