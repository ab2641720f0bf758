// The kernels, for the host code that launches them.
#pragma once

#include <cstdint>

#include "backend/cuda/kernel_params.h"
#include "tandem/types.h"

namespace tandem::cuda {

// Kernels as cudaLaunchKernelExC and cudaFuncSetAttribute take them. Each has one argument, a
// DispatchParams or a CombineParams, and blocks of kNumThreads threads, those of combine_kernel_for
// of kLeastThreads at least. `elsewhere`: some peers are on other hosts.
const void* dispatch_kernel_for(Format format, DType x_dtype,
                                bool elsewhere);  // packed; slotted: the send phase
const void* receive_kernel(bool elsewhere);       // slotted: the receive phase
const void* combine_kernel_for(DType dtype, bool elsewhere);
const void* acquire_kernel();              // rule 2 between two combines of one handle
const void* stage_kernel(bool elsewhere);  // staged combine: the send phase
// One of combine_kernel_for?
bool is_combine_kernel(const void* kernel);

// Dynamic shared memory of a block.
std::int64_t dispatch_shared_bytes(int num_ranks, int num_experts, bool elsewhere);
std::int64_t receive_shared_bytes(int num_ranks, int num_experts);
std::int64_t combine_shared_bytes(int num_ranks);
std::int64_t stage_shared_bytes(int num_ranks);

}  // namespace tandem::cuda
