#include "runtime/waiter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace tandem::runtime {
namespace {

// About 50 us of pauses: longer than a round trip between two cores, shorter than a time slice.
constexpr int kSpinsWithRoom = 1000;

// The longest sleep without looking again: bounds the harm of a publisher that dies between its
// store and its ring.
constexpr std::chrono::nanoseconds kLongestSleep = std::chrono::milliseconds(50);

std::atomic_ref<std::uint32_t> atomic(std::uint32_t& word) {
  return std::atomic_ref<std::uint32_t>(word);
}

}  // namespace

void ring(layout::Doorbell& doorbell) {
  if (atomic(doorbell.sleepers).load(std::memory_order_relaxed) == 0) return;
  atomic(doorbell.rings).fetch_add(1, std::memory_order_relaxed);
  syscall(SYS_futex, &doorbell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Waiter::Waiter(layout::Doorbell& doorbell, std::chrono::nanoseconds limit, int num_runnable)
    : doorbell_(&doorbell),
      limit_(limit),
      num_spins_(num_runnable <= sysconf(_SC_NPROCESSORS_ONLN) ? kSpinsWithRoom : 0) {}

void Waiter::yield() { sched_yield(); }

std::uint32_t Waiter::prepare_to_sleep() {
  const std::uint32_t rings = atomic(doorbell_->rings).load(std::memory_order_relaxed);
  atomic(doorbell_->sleepers).fetch_add(1, std::memory_order_relaxed);
  fence(std::memory_order_seq_cst);  // pairs with the publisher's fence before ring()
  return rings;
}

void Waiter::cancel_sleep() { atomic(doorbell_->sleepers).fetch_sub(1, std::memory_order_relaxed); }

void Waiter::sleep(std::uint32_t rings, std::chrono::steady_clock::time_point start) {
  const std::chrono::nanoseconds left = limit_ - (std::chrono::steady_clock::now() - start);
  const std::chrono::nanoseconds nap =
      std::clamp(left, std::chrono::nanoseconds::zero(), kLongestSleep);
  const timespec time{.tv_sec = static_cast<time_t>(nap.count() / 1'000'000'000),
                      .tv_nsec = static_cast<long>(nap.count() % 1'000'000'000)};
  syscall(SYS_futex, &doorbell_->rings, FUTEX_WAIT, rings, &time, nullptr, 0);
  cancel_sleep();
}

}  // namespace tandem::runtime
