#include "backend/cuda/device_memory.h"

#include <atomic>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "layout/row.h"
#include "runtime/memory_file.h"
#include "tandem/error.h"

namespace tandem::cuda {

namespace {

std::atomic<int> num_freeing_when_idle = 0;

// Of the current device, and without keeping anybody from copying.
void await_idle() {
  // Relaxed: there is no more to it than the number. For what is being made by another thread no
  // kernel waits yet.
  if (num_freeing_when_idle.load(std::memory_order_relaxed) == 0) return;
  warn_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// Frees memory of a device.
template <typename Free>
void free_on(int device, const Free& free) {
  int before = 0;
  warn_cuda(cudaGetDevice(&before), "cudaGetDevice");
  warn_cuda(cudaSetDevice(device), "cudaSetDevice");
  await_idle();
  free();
  warn_cuda(cudaSetDevice(before), "cudaSetDevice");
}

}  // namespace

FreeingWhenIdle::FreeingWhenIdle() { ++num_freeing_when_idle; }
FreeingWhenIdle::~FreeingWhenIdle() { --num_freeing_when_idle; }

std::shared_ptr<std::byte> allocate_device(int device, std::int64_t size_bytes) {
  const DeviceScope scope(device);
  void* memory = nullptr;
  const cudaError_t status =
      cudaMalloc(&memory, static_cast<std::size_t>(size_bytes > 0 ? size_bytes : 1));
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    warn_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    throw Error(ErrorCode::kResource, "no memory on CUDA device " + std::to_string(device) +
                                          ": asked for " + std::to_string(size_bytes) + " bytes, " +
                                          std::to_string(free_bytes) + " free");
  }
  check_cuda(status, "cudaMalloc");
  return {static_cast<std::byte*>(memory), [device](std::byte* pointer) {
            free_on(device, [pointer] { warn_cuda(cudaFree(pointer), "cudaFree"); });
          }};
}

std::shared_ptr<std::byte> allocate_mapped_host(int device, std::int64_t size_bytes) {
  const DeviceScope scope(device);
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, static_cast<std::size_t>(size_bytes),
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  std::memset(memory, 0, static_cast<std::size_t>(size_bytes));
  return {static_cast<std::byte*>(memory), [device](std::byte* pointer) {
            free_on(device, [pointer] { warn_cuda(cudaFreeHost(pointer), "cudaFreeHost"); });
          }};
}

runtime::Descriptor offer_block(const std::shared_ptr<std::byte>& block) {
  cudaIpcMemHandle_t handle{};
  check_cuda(cudaIpcGetMemHandle(&handle, block.get()), "cudaIpcGetMemHandle");
  runtime::MemoryFile file = runtime::make_memory_file("tandem block", sizeof handle);
  runtime::Mapping mapping;
  if (file.problem.empty()) mapping = runtime::map_shared(file.descriptor, sizeof handle);
  const std::string problem = file.problem + mapping.problem;
  if (!problem.empty()) throw Error(ErrorCode::kResource, problem);
  std::memcpy(mapping.memory.get(), &handle, sizeof handle);
  return std::move(file.descriptor);
}

std::byte* map_offered_block(const runtime::Descriptor& offer, int device) {
  cudaIpcMemHandle_t handle{};
  if (!runtime::is_memory_file(offer, sizeof handle)) {
    throw Error(ErrorCode::kMismatch, "what was offered is no block of a GPU");
  }
  const runtime::Mapping mapping = runtime::map_shared(offer, sizeof handle);
  if (!mapping.problem.empty()) throw Error(ErrorCode::kResource, mapping.problem);
  std::memcpy(&handle, mapping.memory.get(), sizeof handle);
  const DeviceScope scope(device);
  void* memory = nullptr;
  if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return static_cast<std::byte*>(memory);
}

PeerMemory::PeerMemory(std::shared_ptr<std::byte> own, int device, int rank, int num_ranks)
    : own_(std::move(own)), device_(device), opened_(num_ranks), blocks_(num_ranks) {
  blocks_[rank] = own_.get();
}

PeerMemory::PeerMemory(std::shared_ptr<runtime::Bootstrap> bootstrap,
                       std::shared_ptr<std::byte> own, int device,
                       const std::vector<DeviceFacts>& facts, int num_ranks)
    : bootstrap_(std::move(bootstrap)),
      own_(std::move(own)),
      device_(device),
      opened_(num_ranks),
      blocks_(num_ranks) {
  const std::vector<int> ranks = bootstrap_->host_ranks();
  const int size = static_cast<int>(ranks.size());
  blocks_[bootstrap_->rank()] = own_.get();
  std::vector<bool> reached(size, true);
  const DeviceScope scope(device_);
  if (bootstrap_->host().in_one_process()) {
    share_in_process(ranks, facts, reached);
  } else {
    share_between_processes(ranks, reached);
  }

  // Everybody on this host learns every pair.
  std::vector<std::byte> message(size);
  for (int peer = 0; peer < size; ++peer) {
    message[peer] = static_cast<std::byte>(reached[peer] ? 1 : 0);
  }
  const auto all = bootstrap_->host().all_gather(message);
  std::string pairs;
  int culprit = -1;
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      if (all[from][to] != std::byte{0}) continue;
      pairs += (pairs.empty() ? "" : ", ") + std::to_string(ranks[from]) + " -> " +
               std::to_string(ranks[to]);
      if (culprit < 0) culprit = ranks[to];
    }
  }
  if (pairs.empty()) return;
  abandoned_ = true;
  throw Error(ErrorInfo{.code = ErrorCode::kUnreachable, .phase = Phase::kSetup, .peer = culprit},
              "ranks cannot reach the memory of the GPUs of others: " + pairs);
}

void PeerMemory::share_in_process(const std::vector<int>& ranks,
                                  const std::vector<DeviceFacts>& facts,
                                  std::vector<bool>& reached) {
  shared_ = bootstrap_->host().all_gather_objects(own_);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int peer = ranks[i];
    blocks_[peer] = static_cast<std::byte*>(shared_[i].get());
    if (facts[peer].device == device_) continue;
    int can_access = 0;
    check_cuda(cudaDeviceCanAccessPeer(&can_access, device_, facts[peer].device),
               "cudaDeviceCanAccessPeer");
    reached[i] = can_access != 0;
    if (can_access == 0) continue;
    const cudaError_t status = cudaDeviceEnablePeerAccess(facts[peer].device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      check_cuda(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

void PeerMemory::share_between_processes(const std::vector<int>& ranks,
                                         std::vector<bool>& reached) {
  cudaIpcMemHandle_t handle{};
  check_cuda(cudaIpcGetMemHandle(&handle, own_.get()), "cudaIpcGetMemHandle");
  std::vector<std::byte> message(sizeof handle);
  std::memcpy(message.data(), &handle, sizeof handle);
  const auto handles = bootstrap_->host().all_gather(message);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int peer = ranks[i];
    if (peer == bootstrap_->rank()) continue;
    std::memcpy(&handle, handles[i].data(), sizeof handle);
    void* memory = nullptr;
    const cudaError_t status =
        cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      reached[i] = false;
      continue;
    }
    opened_[peer] = memory;
    blocks_[peer] = static_cast<std::byte*>(memory);
  }
}

void PeerMemory::set_block(int rank, std::byte* block) {
  if (opened_[rank] != nullptr) stale_.push_back(opened_[rank]);
  opened_[rank] = block;
  blocks_[rank] = block;
}

void PeerMemory::close_stale(const std::vector<void*>& stale) {
  for (void* memory : stale) warn_cuda(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle");
}

PeerMemory::~PeerMemory() {
  if (!is_open_ && bootstrap_->host().in_one_process()) return;  // ownership is shared
  // An owner frees its block only when no peer's kernel touches it any more. A rank whose buffer
  // has failed meets the others too, who may know nothing of it: were it to go ahead, they would
  // meet in the midst of what it does next. A peer that is gone ends the wait at once.
  const auto meet = [this] {
    if (abandoned_) return;
    try {
      bootstrap_->host().barrier();
    } catch (const Error&) {
      abandoned_ = true;  // a peer is gone; what it mapped went with it
    }
  };
  if (is_open_) {
    abandoned_ = true;
    new std::shared_ptr<std::byte>(own_);  // to the end of the process
  }
  meet();
  close_stale(stale_);
  for (void* memory : opened_) {
    if (memory != nullptr) warn_cuda(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle");
  }
  meet();
}

}  // namespace tandem::cuda
