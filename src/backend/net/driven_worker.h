// A UCX worker with a thread that takes in what comes and sends what could not leave at once, and
// sleeps when there is neither: so its owner may be doing anything, or nothing. A caller that waits
// does better to look itself, and as long as one does the thread leaves the worker to it: two that
// wake for each message only get in each other's way.
//
// Thread safety: whoever uses ucx() holds mutex(), as the thread does while UCX calls handlers;
// before start() and after stop() the owner is alone.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "backend/net/ucx_worker.h"
#include "runtime/deadline.h"
#include "runtime/descriptor.h"

namespace tandem::net {

class DrivenWorker {
 public:
  DrivenWorker();
  ~DrivenWorker() { stop(); }
  DrivenWorker(const DrivenWorker&) = delete;
  DrivenWorker& operator=(const DrivenWorker&) = delete;

  // Once handlers are installed. What these refer to must last until stop() has returned. The
  // thread calls `send`, with the mutex held, each time before it looks and before it sleeps.
  void start(std::function<void()> send = [] {});
  void stop();

  [[nodiscard]] UcxWorker& ucx() { return worker_; }
  [[nodiscard]] const UcxWorker& ucx() const { return worker_; }

  // With the mutex held: somebody shall see to what was posted and has not left.
  void push() {
    if (!napping_) ucp_worker_signal(worker_.get());
  }

  // Takes in what has come, unless another thread is at it. Who calls this is taken to go on doing
  // so, until hand_over or until it has stayed away for a moment.
  void progress();
  // With the mutex held: from now on the thread does it.
  void hand_over();

  // For those who wait for what handlers change: the mutex, and a condition that is signalled after
  // handlers have been called.
  [[nodiscard]] std::mutex& mutex() { return mutex_; }
  [[nodiscard]] std::condition_variable& changed() { return changed_; }
  // For a change, or the deadline; may also end without either.
  void wait(std::unique_lock<std::mutex>& lock, const runtime::Deadline& deadline);

 private:
  void run();

  UcxWorker worker_;
  std::function<void()> send_;
  runtime::Descriptor stop_;  // an eventfd
  bool stopping_ = false;
  bool attended_ = false;  // progress() has been called since the thread looked whether it is
  bool napping_ = false;   // the thread, as long as that is so
  std::condition_variable handed_over_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace tandem::net
