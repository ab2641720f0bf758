#include "backend/cuda/occupation.h"

#include <chrono>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

// More than half of what a multiprocessor has, and more than the library's kernels leave beside
// them.
constexpr int kSharedBytes = 200 * 1024;

__global__ void occupy(volatile int* words) {
  atomicAdd_system(const_cast<int*>(&words[1]), 1);
  while (words[0] == 0) __nanosleep(1000);
}

}  // namespace

cudaStream_t make_urgent_stream() {
  int least = 0;
  int greatest = 0;
  require_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
               "cudaStreamCreateWithPriority");
  return stream;
}

Occupation::Occupation(int num_blocks) : stream_(make_urgent_stream()), num_blocks_(num_blocks) {
  void* words = nullptr;
  require_cuda(cudaHostAlloc(&words, 2 * sizeof(int), cudaHostAllocMapped), "cudaHostAlloc");
  words_ = static_cast<volatile int*>(words);
  words_[0] = 0;
  words_[1] = 0;
  require_cuda(
      cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "cudaFuncSetAttribute");
  occupy<<<num_blocks, 32, kSharedBytes, stream_>>>(words_);
  require_cuda(cudaGetLastError(), "occupy");
}

Occupation::~Occupation() {
  release();
  (void)cudaStreamSynchronize(stream_);
  (void)cudaStreamDestroy(stream_);
  (void)cudaFreeHost(const_cast<int*>(words_));
}

void Occupation::await_start() const {
  const auto start = std::chrono::steady_clock::now();
  while (words_[1] < num_blocks_) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) {
      throw std::runtime_error("the GPU has no room for the blocks that are to take it");
    }
  }
}

void Occupation::release() { words_[0] = 1; }

}  // namespace tandem::test
