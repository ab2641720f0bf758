// Memory of a device, and the blocks of device memory that the ranks of a buffer share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/bootstrap.h"
#include "runtime/descriptor.h"

namespace tandem::cuda {

// While one lives, all memory of this library in this process is given back when the device is idle
// only. Freeing waits for kernels at work, and keeps other threads from copying meanwhile: a kernel
// that waits for such a copy would not end. So what copies for kernels has one of these.
class FreeingWhenIdle {
 public:
  FreeingWhenIdle();
  ~FreeingWhenIdle();
  FreeingWhenIdle(const FreeingWhenIdle&) = delete;
  FreeingWhenIdle& operator=(const FreeingWhenIdle&) = delete;
};

// Device memory of `size_bytes` (at least one byte is taken). Throws kResource with the bytes asked
// and free.
std::shared_ptr<std::byte> allocate_device(int device, std::int64_t size_bytes);

// The block of this rank for another process to map, as a file of a few bytes, and the block that
// such a file names. Null if it cannot be had: its process is gone. Not for threads of one process.
runtime::Descriptor offer_block(const std::shared_ptr<std::byte>& block);
std::byte* map_offered_block(const runtime::Descriptor& offer, int device);

// Pinned host memory that kernels can write, zero-filled.
std::shared_ptr<std::byte> allocate_mapped_host(int device, std::int64_t size_bytes);

// What each rank tells the others about its device.
struct DeviceFacts {
  std::uint8_t uuid[16];
  std::int32_t device;         // as its own process counts
  std::int32_t num_sms;        // of the device
  std::int32_t chosen_blocks;  // what the rank asked for; 0: a share
  std::int32_t padding;
};

// The blocks of all ranks of this host, mapped into this process. Between threads they are plain
// pointers (peer access between different devices); between processes CUDA IPC. A block lives until
// its last user lets go of it; between processes teardown meets the peers first, for a bounded
// time. Where processes may join, nobody meets: the owner leaves its block to the end of its
// process.
class PeerMemory {
 public:
  // Collective. `own` is this rank's block, ready for use; `facts` of all ranks. Throws
  // kUnreachable on every rank, naming all pairs that cannot reach each other.
  PeerMemory(std::shared_ptr<runtime::Bootstrap> bootstrap, std::shared_ptr<std::byte> own,
             int device, const std::vector<DeviceFacts>& facts, int num_ranks);
  // Not collective: of a process that joins others, whose blocks follow by set_block.
  PeerMemory(std::shared_ptr<std::byte> own, int device, int rank, int num_ranks);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Null for a rank on another host, or that has not been there yet.
  [[nodiscard]] std::byte* block(int rank) const { return blocks_[rank]; }
  // Processes may join: nobody can know who still maps whose block.
  void open_to_others() { is_open_ = true; }
  // In place of an earlier one, which nothing of this rank's touches any more. That stays mapped
  // until close_stale, which waits for what this process has at work on the device.
  void set_block(int rank, std::byte* block);
  [[nodiscard]] bool has_stale() const { return !stale_.empty(); }
  [[nodiscard]] std::vector<void*> take_stale() { return std::exchange(stale_, {}); }
  static void close_stale(const std::vector<void*>& stale);

 private:
  // `ranks` of this host; `reached`: which of them, in that order.
  void share_in_process(const std::vector<int>& ranks, const std::vector<DeviceFacts>& facts,
                        std::vector<bool>& reached);
  void share_between_processes(const std::vector<int>& ranks, std::vector<bool>& reached);

  std::shared_ptr<runtime::Bootstrap> bootstrap_;
  std::shared_ptr<std::byte> own_;
  int device_;
  std::vector<std::shared_ptr<void>> shared_;  // in one process: keeps peers' blocks alive
  std::vector<void*> opened_;                  // between processes, by rank
  std::vector<void*> stale_;                   // opened for processes that have gone
  std::vector<std::byte*> blocks_;             // by rank
  bool abandoned_ = false;
  bool is_open_ = false;
};

}  // namespace tandem::cuda
