// Waiting between threads: what is published is seen, sleepers are woken, the limit holds.
#include "runtime/waiter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tandem::runtime {
namespace {

using namespace std::chrono_literals;

constexpr int kCrowded = 1 << 20;  // more runnable threads than processors: no spinning

TEST(Waiter, ReturnsAtOnceWhenItIsDone) {
  layout::Doorbell doorbell{};
  Waiter waiter(doorbell, 1h, 1);
  EXPECT_FALSE(waiter.wait([] { return true; }));
}

TEST(Waiter, EndsAtItsLimitAndSaysHowLongItWaited) {
  layout::Doorbell doorbell{};
  for (const int num_runnable : {1, kCrowded}) {
    Waiter waiter(doorbell, 20ms, num_runnable);
    const auto start = std::chrono::steady_clock::now();
    const auto waited = waiter.wait([] { return false; });
    ASSERT_TRUE(waited);
    EXPECT_GE(*waited, 20ms);
    EXPECT_LE(*waited, std::chrono::steady_clock::now() - start);
  }
  EXPECT_EQ(doorbell.sleepers, 0U);
}

TEST(Waiter, ALimitShorterThanAYieldStillEnds) {
  layout::Doorbell doorbell{};
  Waiter waiter(doorbell, 1ns, kCrowded);
  EXPECT_TRUE(waiter.wait([] { return false; }));
}

TEST(Waiter, EndsBeforeItsLimitWhereThereIsNoHope) {
  layout::Doorbell doorbell{};
  Waiter waiter(doorbell, 1h, kCrowded);
  int looks = 0;
  EXPECT_TRUE(waiter.wait([] { return false; }, [&] { return ++looks == 2; }));
  EXPECT_EQ(looks, 2);
}

TEST(Waiter, NoPublishedWordIsMissedOverManyTurns) {
  // Two threads hand a number back and forth; a lost wake-up would cost a nap of 50 ms each.
  layout::Doorbell doorbells[2]{};
  std::atomic<int> words[2]{};
  constexpr int kTurns = 3000;
  const auto play = [&](int self) {
    Waiter waiter(doorbells[self], 20s, kCrowded);
    for (int turn = 1; turn <= kTurns; ++turn) {
      if (self == 1) {
        ASSERT_FALSE(
            waiter.wait([&] { return words[self].load(std::memory_order_acquire) == turn; }));
      }
      words[self ^ 1].store(turn, std::memory_order_release);
      fence(std::memory_order_seq_cst);
      ring(doorbells[self ^ 1]);
      if (self == 0) {
        ASSERT_FALSE(
            waiter.wait([&] { return words[self].load(std::memory_order_acquire) == turn; }));
      }
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(words[0], kTurns);
}

TEST(Ring, CountsOnlyWhereSomebodySleeps) {
  layout::Doorbell doorbell{};
  ring(doorbell);
  EXPECT_EQ(doorbell.rings, 0U);
  doorbell.sleepers = 1;
  ring(doorbell);
  EXPECT_EQ(doorbell.rings, 1U);
}

}  // namespace
}  // namespace tandem::runtime
