// How both contenders are timed: the same code, over a piece of memory that all ranks share.
//
// Each iteration: barrier, dispatch, barrier, experts (not timed), barrier, combine. An operation's
// time on a rank runs from its own departure from the barrier to its own return; the iteration's
// figure is that of the slowest rank, so waiting for a late peer counts. Medians and 99th
// percentiles are taken over the iterations. The barriers make ranks start together, as ranks do
// that have just finished equal work, and give neither side credit for what overlaps the experts.
// Afterwards the same pairs run back to back without barriers or experts (`pair`): there a rank may
// run ahead of its peers as far as its protocol allows, and rows stay in the cache that wrote them.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem::bench {

inline double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

inline int num_cores() {
  static const int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return cores;
}

// What the ranks share: a barrier, a number that rank 0 announces, and everybody's samples. Begins
// as zeros.
class SharedArea {
 public:
  static constexpr int kMaxIterations = 4096;
  static constexpr int kMaxRanks = 64;

  struct Sample {
    float dispatch_us;
    float combine_us;
  };
  Sample samples[kMaxRanks][kMaxIterations];
  float pair_us[kMaxRanks];
  std::int32_t announced;

  // Spins, and where ranks outnumber cores yields soon; calls `idle` now and then meanwhile. Ends
  // the process if a rank stays away.
  void barrier(
      int num_ranks, const std::function<void()>& idle = [] {}) {
    const std::uint32_t generation = generation_.load(std::memory_order_relaxed);
    // Release hands over what this rank wrote; the last to come acquires it for all.
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);  // pairs with the acquire below
      return;
    }
    const int spins = num_ranks > num_cores() ? 16 : 1 << 20;
    constexpr int kSpinsWithoutIdle = 64;  // some microseconds: who comes at once is not disturbed
    const double start = now_us();
    for (int spin = 1; generation_.load(std::memory_order_acquire) == generation; ++spin) {
      pause();
      if (spin % kSpinsWithoutIdle == 0) idle();
      if (spin % spins != 0) continue;
      sched_yield();
      if (now_us() - start > kLongestWaitUs) {
        std::fprintf(stderr, "benchmark: a rank did not come to the barrier\n");
        std::_Exit(1);
      }
    }
  }

 private:
  static constexpr double kLongestWaitUs = 60e6;
  alignas(128) std::atomic<std::int32_t> arrived_;
  alignas(128) std::atomic<std::uint32_t> generation_;
};

// Zeros that forked children share, or, for ranks that others start on one machine, the file
// `path`, which is made as long as it has to be.
inline SharedArea* map_area(const std::string& path) {
  int file = -1;
  if (!path.empty()) {
    file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(SharedArea)) != 0) {
      throw std::runtime_error("cannot use the file " + path);
    }
  }
  void* const memory = mmap(nullptr, sizeof(SharedArea), PROT_READ | PROT_WRITE,
                            MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<SharedArea*>(memory);
}

// A contender on one rank.
struct Contender {
  std::function<void()> dispatch;
  std::function<void()> experts;  // reads what was received, writes the outputs
  std::function<void()> combine;
  std::function<void()>
      check;  // after a dispatch, experts and combine: throws if a result is wrong
  // While the rank waits for others outside of the timed operations.
  std::function<void()> idle = [] {};
};

struct Statistics {
  double median_us = 0;
  double p99_us = 0;
};

inline Statistics statistics(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t last = values.size() - 1;
  return {values[last / 2], values[static_cast<std::size_t>(0.99 * static_cast<double>(last))]};
}

struct Timings {
  Statistics dispatch;
  Statistics combine;
  double pair_us = 0;  // back to back
  int iterations = 0;
};

// Collective. Checks the results of the first two iterations (two, as Tandem has two halves) and of
// the last, then measures for about `seconds`. The result is meant for rank 0.
inline Timings measure(SharedArea& area, int rank, int num_ranks, const Contender& contender,
                       double seconds) {
  const auto barrier = [&] { area.barrier(num_ranks, contender.idle); };
  const auto iterate = [&](SharedArea::Sample& sample) {
    barrier();
    const double start = now_us();
    contender.dispatch();
    const double dispatched = now_us();
    barrier();  // else experts would delay ranks of the same core that still wait
    contender.experts();
    barrier();
    const double resumed = now_us();
    contender.combine();
    const double combined = now_us();
    sample = {static_cast<float>(dispatched - start), static_cast<float>(combined - resumed)};
  };
  SharedArea::Sample ignored{};
  for (int i = 0; i < 2; ++i) {
    iterate(ignored);
    contender.check();
  }

  // As many iterations as fit into the time, counted with the untimed parts.
  constexpr int kWarmUp = 4;
  barrier();
  const double start = now_us();
  for (int i = 0; i < kWarmUp; ++i) iterate(ignored);
  if (rank == 0) {
    const double each_us = (now_us() - start) / kWarmUp;
    area.announced = static_cast<std::int32_t>(
        std::clamp(seconds * 1e6 / each_us, 5.0, double{SharedArea::kMaxIterations}));
  }
  barrier();
  const int iterations = area.announced;
  for (int i = 0; i < iterations; ++i) iterate(area.samples[rank][i]);
  contender.check();

  barrier();
  const double pairs_start = now_us();
  for (int i = 0; i < iterations; ++i) {
    contender.dispatch();
    contender.combine();
  }
  area.pair_us[rank] = static_cast<float>((now_us() - pairs_start) / iterations);
  barrier();

  Timings timings;
  timings.iterations = iterations;
  std::vector<double> dispatches(iterations);
  std::vector<double> combines(iterations);
  for (int r = 0; r < num_ranks; ++r) {
    timings.pair_us = std::max<double>(timings.pair_us, area.pair_us[r]);
    for (int i = 0; i < iterations; ++i) {
      dispatches[i] = std::max<double>(dispatches[i], area.samples[r][i].dispatch_us);
      combines[i] = std::max<double>(combines[i], area.samples[r][i].combine_us);
    }
  }
  timings.dispatch = statistics(dispatches);
  timings.combine = statistics(combines);
  barrier();  // nobody overwrites samples that rank 0 still reads
  return timings;
}

}  // namespace tandem::bench
