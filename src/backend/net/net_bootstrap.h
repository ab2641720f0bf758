// The bootstrap of ranks on several hosts: every rank sends its part of an exchange to every other,
// over the connections that its buffers will use. What is about shared memory goes through host(),
// the bootstrap of the ranks on this host.
//
// A failure that a rank sees it tells everybody. A bootstrap that has failed stays failed. Where
// the word of it comes before a rank has taken note that the exchange before is complete, that one
// still is.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "backend/net/connections.h"
#include "runtime/exchange.h"
#include "runtime/failure.h"
#include "runtime/network.h"

namespace tandem::net {

// The parts of exchanges that have come, by the rank that sent them.
class Exchanges final : public Receiver, public std::enable_shared_from_this<Exchanges> {
 public:
  explicit Exchanges(int size) : parts_(static_cast<std::size_t>(size)) {}

  struct Part {
    std::uint64_t round = 0;
    runtime::Exchange kind = runtime::Exchange::kBarrier;
    std::vector<std::byte> message;
  };
  // The first that is known here, and the exchange that it ended.
  struct Failed {
    std::uint64_t round = 0;
    runtime::Failure failure;
  };

  std::optional<Delivery> accept(int source, std::span<const std::byte> header,
                                 std::size_t payload_bytes) override;
  void peer_lost(int) override {}  // who waits looks at the connections

  // With the connections' mutex held. The part of `source` in `round`, if it has come.
  [[nodiscard]] Part* find(int source, std::uint64_t round);
  void forget(std::uint64_t round);
  [[nodiscard]] std::optional<Failed>& failed() { return failed_; }

 private:
  std::vector<std::deque<Part>> parts_;
  std::optional<Failed> failed_;
};

class NetBootstrap final : public runtime::Bootstrap, public runtime::Network {
 public:
  // Collective; calls `all_gather` once.
  NetBootstrap(const runtime::Party& party, const Communicator::AllGather& all_gather);
  ~NetBootstrap() override;

  [[nodiscard]] int rank() const override { return party_.rank; }
  [[nodiscard]] int size() const override { return party_.size; }
  [[nodiscard]] bool in_one_process() const override { return false; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return party_.timeout; }
  [[nodiscard]] std::vector<int> host_ranks() const override { return party_.host_ranks; }
  [[nodiscard]] Bootstrap& host() override { return *host_; }
  [[nodiscard]] Network* network() override { return this; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override;
  void barrier() override;
  // Descriptors and objects stay on their host.
  [[nodiscard]] std::vector<runtime::Descriptor> all_gather_descriptors(
      const runtime::Descriptor& own) override;
  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void> own) override;

  [[nodiscard]] std::unique_ptr<runtime::RemotePeers> open(runtime::RemoteMemory memory) override;

 private:
  void connect(const Communicator::AllGather& all_gather);
  [[nodiscard]] std::vector<std::vector<std::byte>> exchange(runtime::Exchange kind,
                                                             std::span<const std::byte> message);
  void send(int peer, runtime::Exchange kind, bool is_failure, std::span<const std::byte> message);
  // Remembers a failure, tells the peers, and throws it.
  [[noreturn]] void fail(std::unique_lock<std::mutex> lock, runtime::Failure failure);

  runtime::Party party_;
  std::shared_ptr<Connections> connections_;
  std::shared_ptr<Exchanges> exchanges_;
  std::shared_ptr<Bootstrap> host_;
  std::uint64_t round_ = 0;
  std::uint32_t next_channel_ = 1;  // 0 is the bootstrap's own
};

}  // namespace tandem::net
