// The bootstrap of ranks that are threads of one process: they meet in a ThreadGroup and hand each
// other bytes and shared pointers.
//
// A group that has failed (a rank timed out, left, or called another exchange than its peers) stays
// failed: every later call on it throws the same error, so that all ranks learn the same.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/bootstrap.h"
#include "runtime/exchange.h"
#include "runtime/failure.h"

namespace tandem::runtime {

// Shared by the ranks; thread-safe.
class ThreadGroup {
 public:
  struct Item {
    std::vector<std::byte> message;
    std::shared_ptr<void> object;
  };
  using Items = std::vector<Item>;  // by rank

  explicit ThreadGroup(int size);

  [[nodiscard]] int size() const { return static_cast<int>(arrived_.size()); }

  // Collective: gives `own`, returns every rank's item.
  [[nodiscard]] std::shared_ptr<const Items> exchange(int rank, Exchange kind, Item own,
                                                      std::chrono::milliseconds timeout);

  // `rank` takes part no more. Peers that wait for it get kPeerLost with `why` at once. The first
  // reason given for a rank counts.
  void leave(int rank, const std::string& why);

 private:
  [[noreturn]] void fail(Failure failure);  // with the mutex held
  [[nodiscard]] Failure lost(int rank) const;
  [[nodiscard]] std::shared_ptr<const Items> take();

  std::mutex mutex_;
  std::condition_variable changed_;

  // The exchange that is gathering.
  std::uint64_t generation_ = 0;  // exchanges completed so far
  std::shared_ptr<Items> gathering_;
  std::vector<bool> arrived_;  // by rank
  int num_arrived_ = 0;
  Exchange kind_ = Exchange::kBarrier;
  int first_rank_ = 0;  // that named the kind

  // The exchange that completed last, until every rank has taken it: the next one cannot complete
  // before, and objects are not held longer than their ranks want them.
  std::shared_ptr<const Items> completed_;
  int num_to_take_ = 0;

  std::vector<std::optional<std::string>> departed_;  // by rank: why
  std::optional<Failure> failure_;
};

// One rank's end.
class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<ThreadGroup> group, int rank, std::chrono::milliseconds timeout)
      : group_(std::move(group)), rank_(rank), timeout_(timeout) {}
  ~ThreadBootstrap() override { group_->leave(rank_, "has left the communicator"); }
  ThreadBootstrap(const ThreadBootstrap&) = delete;
  ThreadBootstrap& operator=(const ThreadBootstrap&) = delete;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return group_->size(); }
  [[nodiscard]] bool in_one_process() const override { return true; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override;
  void barrier() override;
  [[nodiscard]] std::vector<Descriptor> all_gather_descriptors(const Descriptor& own) override;
  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void> own) override;

 private:
  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  std::chrono::milliseconds timeout_;
};

}  // namespace tandem::runtime
