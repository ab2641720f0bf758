// Loads, stores, fences and atomics of the protocol, as PTX (ISA 8.x, section "Memory Consistency
// Model"). Everything that orders memory between ranks is in this file.
//
// Control words are single 64-bit relaxed accesses of system scope: morally strong with each other
// whatever device the peer is on, and as cheap as weak ones on memory of this device. Payload is
// ordered by fences around them: writer  payload; fence; relaxed store  and reader  relaxed load;
// fence; payload  form release and acquire patterns. The fences' scope is the widest that a buffer
// needs: .gpu if all ranks share one device, .sys otherwise.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

__device__ __forceinline__ std::uint64_t load_relaxed(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders all earlier accesses of this thread, and those it has synchronised with (barriers of its
// block, earlier kernels of its stream), against its later ones.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void fence(bool across_devices) {
  if (across_devices) {
    fence_sys();
  } else {
    fence_gpu();
  }
}

// Counters go up by `inc` (which wraps at the bound): of `add` the compiler makes an exchange with
// the rest of the warp, which then waits for the answer as long as the thread that asked.
__device__ __forceinline__ std::uint32_t increment_relaxed_gpu(std::uint32_t* address) {
  std::uint32_t before;
  asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(address)
               : "memory");
  return before;
}

// Waits for nothing.
__device__ __forceinline__ void decrement_relaxed_gpu(std::uint32_t* address) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 0xffffffff;" ::"l"(address) : "memory");
}

__device__ __forceinline__ std::uint32_t increment_acq_rel_gpu(std::uint32_t* address) {
  std::uint32_t before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(address)
               : "memory");
  return before;
}

// 16 bytes of payload that is read once: kept out of the first-level cache. Coherent (not .nc):
// peers wrote it while this kernel ran.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// The same, or zeros where `wanted` is false: in one instruction, so that several stay in flight.
__device__ __forceinline__ uint4 load_once_if(const void* address, bool wanted) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<std::uint32_t>(wanted)));
  return value;
}

// The index-th of an array of int64 (`wide`) or int32; -1 where it is not `wanted`.
__device__ __forceinline__ std::int64_t load_index_if(const void* array, int index, bool wide,
                                                      bool wanted) {
  const auto* address = static_cast<const char*>(array) + std::int64_t{index} * (wide ? 8 : 4);
  std::int64_t value;
  asm volatile(
      "{\n"
      ".reg .pred w, n;\n"
      "setp.ne.u32 w, %2, 0;\n"
      "setp.ne.u32 n, %3, 0;\n"
      "mov.s64 %0, -1;\n"
      "@w ld.global.s64 %0, [%1];\n"
      "@n ld.global.s32 %0, [%1];\n"
      "}\n"
      : "=&l"(value)
      : "l"(address), "r"(static_cast<std::uint32_t>(wanted && wide)),
        "r"(static_cast<std::uint32_t>(wanted && !wide)));
  return value;
}

__device__ __forceinline__ void store_once(void* address, const uint4& value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace tandem::cuda::ptx
