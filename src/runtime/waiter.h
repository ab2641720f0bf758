// Waiting for words that other ranks write into this rank's control region: spin, then yield, then
// sleep on a futex that works between processes (libstdc++'s atomic::wait does not). Every wait is
// bounded.
//
// A publisher stores its word (release), then rings the receiver's doorbell; see Doorbell below for
// why no wake-up is lost.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "layout/block.h"

namespace tandem::runtime {

// What ranks that are processes share may not hide a lock, of this process alone.
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

// A fence. GCC's thread sanitizer does not model fences and says so; nothing that it must see
// depends on this one, since the words themselves are released and acquired.
inline void fence(std::memory_order order) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
  std::atomic_thread_fence(order);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
}

// Tells the CPU that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wakes the sleepers of a doorbell, if there are any. Call after storing the words and
// fence(std::memory_order_seq_cst).
//
// Sleeper: sleepers += 1; fence; look at the words; sleep while rings == the value read before
// looking. Publisher: store word; fence; if sleepers: rings += 1, wake. Of the two fences one comes
// first: either the sleeper sees the word, or the publisher sees the sleeper and changes `rings`,
// so that the sleeper does not fall asleep or is woken.
void ring(layout::Doorbell& doorbell);

class Waiter {
 public:
  // `num_runnable`: threads on this host that may be busy at once; with fewer processors than that,
  // spinning steals time from whoever is waited for, and is left out.
  Waiter(layout::Doorbell& doorbell, std::chrono::nanoseconds limit, int num_runnable);

  [[nodiscard]] std::chrono::nanoseconds limit() const { return limit_; }
  // Holds for a wait that is under way too.
  void set_limit(std::chrono::nanoseconds limit) { limit_ = limit; }
  // The same, but no longer than `limit`.
  [[nodiscard]] Waiter within(std::chrono::nanoseconds limit) const {
    Waiter shorter = *this;
    shorter.limit_ = std::min(limit_, limit);
    return shorter;
  }

  // Waits until `done()` is true. Returns nothing, or how long it waited in vain: until the limit,
  // or until `hopeless()`, which is asked after each sleep; `resting()` is called before each.
  template <typename Done, typename Hopeless, typename Resting>
  [[nodiscard]] std::optional<std::chrono::nanoseconds> wait(Done&& done, Hopeless&& hopeless,
                                                             Resting&& resting) {
    if (done()) return std::nullopt;
    for (int spin = 0; spin < num_spins_; ++spin) {
      relax();
      if (done()) return std::nullopt;
    }
    const auto start = std::chrono::steady_clock::now();
    for (int turn = 0;; ++turn) {
      bool is_hopeless = false;
      if (turn < kNumYields) {
        yield();
      } else {
        const std::uint32_t rings = prepare_to_sleep();
        if (done()) {
          cancel_sleep();
          return std::nullopt;
        }
        resting();
        sleep(rings, start);
        is_hopeless = hopeless();
      }
      if (done()) return std::nullopt;
      const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start;
      if (is_hopeless || waited >= limit_) return waited;
    }
  }

  template <typename Done, typename Hopeless>
  [[nodiscard]] std::optional<std::chrono::nanoseconds> wait(Done&& done, Hopeless&& hopeless) {
    return wait(std::forward<Done>(done), std::forward<Hopeless>(hopeless), [] {});
  }

  template <typename Done>
  [[nodiscard]] std::optional<std::chrono::nanoseconds> wait(Done&& done) {
    return wait(std::forward<Done>(done), [] { return false; });
  }

 private:
  // A yield costs about a microsecond where somebody else can run and less where nobody can; after
  // this many the peer is evidently not about to answer.
  static constexpr int kNumYields = 200;

  static void yield();
  std::uint32_t prepare_to_sleep();
  void cancel_sleep();
  void sleep(std::uint32_t rings, std::chrono::steady_clock::time_point start);

  layout::Doorbell* doorbell_;
  std::chrono::nanoseconds limit_;
  int num_spins_;
};

}  // namespace tandem::runtime
