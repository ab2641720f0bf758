#include "backend/net/driven_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "tandem/error.h"

namespace tandem::net {
namespace {

// The thread's longest sleep, so that what UCX does by the clock is done.
constexpr int kLongestSleepMs = 1000;

}  // namespace

DrivenWorker::DrivenWorker() : stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) {
    throw Error(ErrorCode::kResource,
                std::string("cannot make an eventfd: ") + std::strerror(errno));
  }
}

void DrivenWorker::start() {
  thread_ = std::thread([this] { run(); });
}

void DrivenWorker::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void DrivenWorker::progress() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock() && worker_.progress()) changed_.notify_all();
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
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      worker_.drain_and_arm();
      changed_.notify_all();
    }
    ::poll(entries, 2, kLongestSleepMs);
  }
}

}  // namespace tandem::net
