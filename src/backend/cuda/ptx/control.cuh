// Programmatic dependent launch and the device clock.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

// Until the grids before this one on its stream have ended and their memory is visible. At once if
// this grid was launched without programmatic serialisation. Nothing that an earlier kernel may
// have written is touched before.
__device__ __forceinline__ void wait_for_earlier_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid of the stream take free multiprocessors, once all blocks of this one have said
// so or ended; it waits there for this grid's end. Said only when this grid waits for nobody any
// more, or when every block of every peer's kernel that it may still wait for has its
// multiprocessor: else the next grid might take it.
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

}  // namespace tandem::cuda::ptx
