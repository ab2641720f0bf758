// The kernels, for the host code that launches them.
#pragma once

#include <cstdint>

#include "backend/cuda/kernel_params.h"
#include "tandem/types.h"

namespace tandem::cuda {

// Kernels as cudaLaunchKernelExC and cudaFuncSetAttribute take them. Each has one argument, a
// DispatchParams or a CombineParams, and blocks of kNumThreads threads, those of combine_kernel_for
// of kLeastThreads at least.
const void* dispatch_kernel_for(Format format, DType x_dtype,
                                Variant variant);  // packed; slotted: the send phase
const void* receive_kernel(Variant variant);       // slotted: the receive phase
const void* combine_kernel_for(DType dtype, Variant variant);
const void* acquire_kernel();               // rule 2 between two combines of one handle
const void* stage_kernel(Variant variant);  // staged combine: the send phase
// One of combine_kernel_for?
bool is_combine_kernel(const void* kernel);

// One for each of kVariants.
template <typename Kernel>
const void* pick(Variant variant, Kernel plain, Kernel elsewhere, Kernel watched, Kernel both) {
  const Kernel kernels[] = {plain, elsewhere, watched, both};
  return reinterpret_cast<const void*>(kernels[static_cast<int>(variant)]);
}

// Dynamic shared memory of a block.
std::int64_t dispatch_shared_bytes(int num_ranks, int num_experts, bool elsewhere);
std::int64_t receive_shared_bytes(int num_ranks, int num_experts);
std::int64_t combine_shared_bytes(int num_ranks);
std::int64_t stage_shared_bytes(int num_ranks);

}  // namespace tandem::cuda
