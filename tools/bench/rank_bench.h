// One rank's part of a bench case.
//
// Three recordings are timed: of combines of one dispatch, of dispatches, and of pairs of the two.
// Before each run all ranks meet; then each starts its own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "bench/cases.h"
#include "common/launch.h"
#include "tandem/buffer.h"
#include "tandem/communicator.h"

namespace tandem::tools {

// Where ranks that are threads meet: they leave within a fraction of a microsecond of each other.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_ranks) : num_ranks_(num_ranks) {}
  void wait();

 private:
  const int num_ranks_;
  std::atomic<int> arrived_{0};
  std::atomic<int> generation_{0};
};

struct BenchPlan {
  const BenchCase& work;
  Backend backend;
  Launch launch;
  std::chrono::nanoseconds timeout;
  int operations;
  int replays;
  const std::vector<std::vector<std::int64_t>>& routing;  // [R] of [T, K]
  const std::vector<std::int64_t>& rows_of_experts;       // [E]
  SpinBarrier& meeting;
};

// Options of the case's buffer.
BufferOptions buffer_options(const BenchPlan& plan);

// Bytes of memory that the case takes on all ranks together.
std::int64_t memory_bytes(const BenchPlan& plan);

// Reports {"error": text}, or for each of "dispatch", "combine" and "pair" two lists of
// microseconds an operation, a value for each run: {"dispatch": {"all": [..], "after_first": [..]},
// ..}.
void run_bench_rank(const BenchPlan& plan, const Communicator& communicator,
                    const ReportFunction& report);

}  // namespace tandem::tools
