#include "backend/net/net_backend.h"

#include "backend/net/meeting.h"
#include "backend/net/net_bootstrap.h"

namespace tandem::net {
namespace {

class UcxNetwork final : public runtime::NetworkInterface {
 public:
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
};

}  // namespace

const runtime::NetworkInterface& network() {
  static const UcxNetwork instance;
  return instance;
}

}  // namespace tandem::net
