// The bootstrap of ranks that are processes of one host and one user. Rank 0 listens on an abstract
// Unix-domain socket, which is no file and vanishes with its process; the others connect to it, and
// every exchange goes through rank 0. docs/starting.md tells what guards it.
//
// A failure that rank 0 sees (a rank missing, gone, or calling something else) it tells everybody.
// A bootstrap that has failed stays failed: later calls throw the same error.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/bootstrap.h"
#include "runtime/exchange.h"
#include "runtime/failure.h"
#include "runtime/socket_channel.h"

namespace tandem::runtime {

// How much longer than its own deadline a rank waits for the verdict of a rank 0 that it knows to
// be there: who was missing. Only a rank 0 that is stopped or starved takes that long.
inline constexpr std::chrono::milliseconds kVerdictGrace{5000};
// How long a failing rank tries to tell a peer that does not read.
inline constexpr std::chrono::milliseconds kTellTimeout{200};

// Throws kInvalidArgument unless these make sense.
void validate_rank(int rank, int size, std::chrono::milliseconds timeout);

// Meets the other ranks under `name`. Where all ranks turn out to be in this process, returns a
// ThreadBootstrap. Arguments are validated; throws as Communicator::connect documents.
std::shared_ptr<Bootstrap> connect_by_name(const std::string& name, int rank, int size,
                                           std::chrono::milliseconds timeout);

class SocketBootstrap final : public Bootstrap {
 public:
  // `channels`: to every rank by rank on rank 0 (its own is empty), to rank 0 alone elsewhere.
  SocketBootstrap(int rank, int size, std::chrono::milliseconds timeout,
                  std::vector<Channel> channels);

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] bool in_one_process() const override { return false; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override;
  void barrier() override;
  [[nodiscard]] std::vector<Descriptor> all_gather_descriptors(const Descriptor& own) override;
  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void> own) override;

 private:
  struct Exchanged {
    std::vector<std::vector<std::byte>> messages;  // by rank
    std::vector<Descriptor> descriptors;           // by rank; empty without descriptors
  };

  [[nodiscard]] Exchanged exchange(Exchange kind, std::span<const std::byte> message,
                                   int descriptor);
  [[nodiscard]] Exchanged exchange_as_root(Exchange kind, std::span<const std::byte> message,
                                           int descriptor);
  [[nodiscard]] Exchanged exchange_as_member(Exchange kind, std::span<const std::byte> message,
                                             int descriptor);
  // Rank 0: reads until every rank has contributed; returns the contributions by rank.
  [[nodiscard]] std::vector<Frame> gather(Exchange kind, Deadline deadline);
  // Rank 0: looks at one frame of `peer`; takes it if it is its contribution.
  void take_contribution(Exchange kind, int peer, Frame frame, std::vector<Frame>& contributions);
  // Rank 0: sends everybody's messages, and descriptors if there are any, to everybody.
  void distribute(Exchange kind, const Exchanged& all, const Deadline& deadline);
  [[nodiscard]] ChannelState send_result(int peer, Exchange kind, const Exchanged& all,
                                         std::span<const std::byte> payload,
                                         const Deadline& deadline);

  // Remembers a failure, tells the peers that this rank can reach, and throws it.
  [[noreturn]] void fail(Failure failure);
  [[nodiscard]] Failure lost(int peer, const std::string& how) const;
  [[nodiscard]] Failure no_room() const;

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::vector<Channel> channels_;
  std::uint64_t round_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace tandem::runtime
