// Ranks of one process meet under one mutex. Each exchange is a generation: the last rank to arrive
// completes it, and a rank that wakes late still finds its result, because the next generation
// needs that very rank.
#include "runtime/thread_bootstrap.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "runtime/deadline.h"

namespace tandem::runtime {

ThreadGroup::ThreadGroup(int size)
    : gathering_(std::make_shared<Items>(size)), arrived_(size, false), departed_(size) {}

std::shared_ptr<const ThreadGroup::Items> ThreadGroup::exchange(int rank, Exchange kind, Item own,
                                                                std::chrono::milliseconds timeout) {
  const auto start = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  if (failure_) failure_->raise();
  if (arrived_[rank]) {
    throw Error(ErrorCode::kOrder, "rank " + std::to_string(rank) +
                                       " is already in a set-up exchange, on another thread");
  }
  if (num_arrived_ == 0) {
    kind_ = kind;
    first_rank_ = rank;
  } else if (kind != kind_) {
    fail(exchange_mismatch(rank, kind, first_rank_, kind_));
  }
  (*gathering_)[rank] = std::move(own);
  arrived_[rank] = true;
  ++num_arrived_;

  if (num_arrived_ == size()) {
    completed_ = std::move(gathering_);
    num_to_take_ = size();
    gathering_ = std::make_shared<Items>(size());
    arrived_.assign(size(), false);
    num_arrived_ = 0;
    ++generation_;
    changed_.notify_all();
    return take();
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (departed_[peer] && !arrived_[peer]) fail(lost(peer));
  }

  const std::uint64_t own_generation = generation_;
  const auto over = [&] { return generation_ != own_generation || failure_.has_value(); };
  if (deadline.is_never()) {
    changed_.wait(lock, over);
  } else if (!changed_.wait_until(lock, deadline.at(), over)) {
    std::vector<int> missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (!arrived_[peer]) missing.push_back(peer);
    }
    fail(missing_ranks_failure(missing, size(), name(kind), Deadline::Clock::now() - start,
                               timeout));
  }
  // Its exchange may have completed before a later one failed.
  if (generation_ != own_generation) return take();
  failure_->raise();
}

void ThreadGroup::leave(int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (departed_[rank]) return;
  departed_[rank] = why;
  if (num_arrived_ > 0 && !arrived_[rank] && !failure_) {
    failure_ = lost(rank);
    changed_.notify_all();
  }
}

void ThreadGroup::fail(Failure failure) {
  failure_ = std::move(failure);
  // Nobody will take what was gathered.
  gathering_ = std::make_shared<Items>(size());
  changed_.notify_all();
  failure_->raise();
}

Failure ThreadGroup::lost(int rank) const {
  return setup_failure(ErrorCode::kPeerLost, rank,
                       "rank " + std::to_string(rank) + " " + *departed_[rank]);
}

std::shared_ptr<const ThreadGroup::Items> ThreadGroup::take() {
  std::shared_ptr<const Items> items = completed_;
  if (--num_to_take_ == 0) completed_.reset();
  return items;
}

std::vector<std::vector<std::byte>> ThreadBootstrap::all_gather(
    std::span<const std::byte> message) {
  const auto items =
      group_->exchange(rank_, Exchange::kMessages,
                       {.message = {message.begin(), message.end()}, .object = {}}, timeout_);
  std::vector<std::vector<std::byte>> messages;
  messages.reserve(items->size());
  for (const auto& item : *items) messages.push_back(item.message);
  return messages;
}

void ThreadBootstrap::barrier() {
  static_cast<void>(group_->exchange(rank_, Exchange::kBarrier, {}, timeout_));
}

std::vector<Descriptor> ThreadBootstrap::all_gather_descriptors(const Descriptor& own) {
  const auto duplicate = [](int fd) {
    Descriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy) {
      throw Error(ErrorCode::kResource,
                  std::string("cannot duplicate a descriptor: ") + std::strerror(errno));
    }
    return copy;
  };
  // A duplicate of its own keeps the descriptor open until the slowest rank has it.
  const auto items = group_->exchange(
      rank_, Exchange::kDescriptors,
      {.message = {}, .object = std::make_shared<Descriptor>(duplicate(own.get()))}, timeout_);
  std::vector<Descriptor> descriptors;
  descriptors.reserve(items->size());
  for (const auto& item : *items) {
    descriptors.push_back(duplicate(static_cast<const Descriptor*>(item.object.get())->get()));
  }
  return descriptors;
}

std::vector<std::shared_ptr<void>> ThreadBootstrap::all_gather_objects(std::shared_ptr<void> own) {
  const auto items = group_->exchange(rank_, Exchange::kObjects,
                                      {.message = {}, .object = std::move(own)}, timeout_);
  std::vector<std::shared_ptr<void>> objects;
  objects.reserve(items->size());
  for (const auto& item : *items) objects.push_back(item.object);
  return objects;
}

}  // namespace tandem::runtime
