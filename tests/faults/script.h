// What goes wrong on one rank, and when: the faults of a test, and the memory through which ranks
// tell each other how far they have come.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/faults.h"
#include "support/world.h"

namespace tandem::test {

using runtime::kNumPoints;
using runtime::Point;

// Memory that all ranks share, be they threads or processes. Made before they start.
class Common {
 public:
  static constexpr int kNumGates = 16;

  Common();
  ~Common();
  Common(const Common&) = delete;
  Common& operator=(const Common&) = delete;

  void open(int gate) const { memory_->gates[gate].store(true, std::memory_order_release); }
  [[nodiscard]] bool is_open(int gate) const {
    return memory_->gates[gate].load(std::memory_order_acquire);  // pairs with the release in open
  }
  // Throws if nobody opens it within half a minute.
  void wait(int gate) const;

  void hit(Point point) const {
    memory_->hits[static_cast<int>(point)].fetch_add(1, std::memory_order_relaxed);
  }
  [[nodiscard]] int hits(Point point) const {
    return memory_->hits[static_cast<int>(point)].load(std::memory_order_relaxed);
  }

 private:
  struct Memory {
    std::atomic<bool> gates[kNumGates];
    std::atomic<int> hits[kNumPoints];
  };
  Memory* memory_;
};

// Points may be passed by the thread of a rank's door too.
class Script final : public runtime::Faults {
 public:
  // Tells `common` of the points that this rank passes, if there is one.
  explicit Script(const Common* common = nullptr) : common_(common) {}

  // From here on: `action` at the nth passing of a point (about `peer`, if that is given).
  void at(Point point, int nth, std::function<void()> action, int peer = -1);

  // Asked about each word that is stored.
  using Store = std::function<bool(Point, int peer, std::atomic_ref<layout::Word>, layout::Word)>;
  void on_store(Store store) { store_ = std::move(store); }

  // From here on: the next word of a point to `peer` is lost.
  void drop(Point point, int peer) { dropped_.push_back({point, peer}); }

  // This buffer, whose handle that is, has these faults.
  void inject(const DispatchHandle& handle);
  // From now on it waits that long, also in the wait at hand.
  static void set_timeout(const DispatchHandle& handle, std::chrono::nanoseconds timeout);

  void pass(Point point, int peer) override;
  bool store(Point point, int peer, std::atomic_ref<layout::Word> word,
             layout::Word value) override;

 private:
  struct Entry {
    Point point;
    int left;
    std::function<void()> action;
    int peer;
  };
  const Common* common_;
  std::mutex mutex_;  // of entries_
  std::vector<Entry> entries_;
  std::vector<std::pair<Point, int>> dropped_;
  Store store_;
};

}  // namespace tandem::test
