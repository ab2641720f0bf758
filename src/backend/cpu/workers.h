// The threads that a rank works with: the caller and, where the buffer's options ask for more,
// helpers that sleep between operations. Rows are dealt out in contiguous shares.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem::cpu {

class Workers {
 public:
  explicit Workers(int num_threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  [[nodiscard]] int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Calls work(thread, begin, end) with [0, num_items) dealt out over the threads, and returns when
  // all have ended. What the caller wrote before is seen by them, what they wrote is seen by the
  // caller. `work` must not throw.
  template <typename Work>
  void run(std::int64_t num_items, const Work& work) {
    if (helpers_.empty()) {
      work(0, std::int64_t{0}, num_items);
      return;
    }
    run_shared(num_items, work);
  }

 private:
  using Share = std::function<void(int, std::int64_t, std::int64_t)>;
  void run_shared(std::int64_t num_items, const Share& work);
  void help(int thread);
  void do_share(int thread, std::int64_t num_items, const Share& work) const;

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable end_;
  const Share* work_ = nullptr;
  std::int64_t num_items_ = 0;
  std::uint64_t turn_ = 0;  // counts calls of run_shared
  int num_busy_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace tandem::cpu
