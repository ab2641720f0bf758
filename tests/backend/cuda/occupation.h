// Multiprocessors that are taken, so that a test decides when a kernel's blocks start.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::test {

class Occupation {
 public:
  // Queues `num_blocks` blocks, each of which takes a whole multiprocessor as soon as one is free,
  // before blocks of streams of ordinary priority.
  explicit Occupation(int num_blocks);
  ~Occupation();  // releases
  Occupation(const Occupation&) = delete;
  Occupation& operator=(const Occupation&) = delete;

  void await_start() const;  // of all blocks
  void release();            // does not wait

 private:
  cudaStream_t stream_ = nullptr;
  volatile int* words_ = nullptr;  // pinned: is it over; how many have started
  int num_blocks_ = 0;
};

// Like Stream's, but its kernels' blocks start before those of ordinary streams.
[[nodiscard]] cudaStream_t make_urgent_stream();

}  // namespace tandem::test
