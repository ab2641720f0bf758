#include "backend/net/driven_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "tandem/error.h"

namespace tandem::net {
namespace {

// The thread's longest sleep, so that what UCX does by the clock is done.
constexpr int kLongestSleepMs = 1000;

// And where UCX sees no end of what there is to do, so that others get the mutex.
constexpr int kShortestSleepMs = 1;

// How long somebody who looked may stay away before the thread takes over: longer than a caller
// needs from one wait to the next, short beside what makes it stop waiting.
constexpr std::chrono::microseconds kNap{500};

}  // namespace

DrivenWorker::DrivenWorker() : stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) {
    throw Error(ErrorCode::kResource,
                std::string("cannot make an eventfd: ") + std::strerror(errno));
  }
}

void DrivenWorker::start(std::function<void()> send) {
  send_ = std::move(send);
  thread_ = std::thread([this] { run(); });
}

void DrivenWorker::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    handed_over_.notify_one();
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void DrivenWorker::progress() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  attended_ = true;
  if (worker_.progress()) changed_.notify_all();
}

void DrivenWorker::hand_over() {
  attended_ = false;
  if (napping_) handed_over_.notify_one();
}

void DrivenWorker::wait(std::unique_lock<std::mutex>& lock, const runtime::Deadline& deadline) {
  if (deadline.is_never()) {
    changed_.wait(lock);
  } else {
    changed_.wait_until(lock, deadline.at());
  }
}

void DrivenWorker::run() {
  pollfd entries[] = {{.fd = worker_.event_fd(), .events = POLLIN, .revents = 0},
                      {.fd = stop_.get(), .events = POLLIN, .revents = 0}};
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    send_();
    const bool armed = worker_.drain_and_arm();
    changed_.notify_all();
    send_();  // what handlers want to
    attended_ = false;
    lock.unlock();
    ::poll(entries, 2, armed ? kLongestSleepMs : kShortestSleepMs);
    lock.lock();
    napping_ = true;
    while (attended_ && !stopping_) {
      attended_ = false;
      handed_over_.wait_for(lock, kNap);
    }
    napping_ = false;
  }
}

}  // namespace tandem::net
