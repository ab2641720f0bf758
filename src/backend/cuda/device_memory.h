// Memory of a device, and the blocks of device memory that the ranks of a buffer share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/bootstrap.h"

namespace tandem::cuda {

// Device memory of `size_bytes` (at least one byte is taken). Throws kResource with the bytes asked
// and free.
std::shared_ptr<std::byte> allocate_device(int device, std::int64_t size_bytes);

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
// time.
class PeerMemory {
 public:
  // Collective. `own` is this rank's block, ready for use; `facts` of all ranks. Throws
  // kUnreachable on every rank, naming all pairs that cannot reach each other.
  PeerMemory(std::shared_ptr<runtime::Bootstrap> bootstrap, std::shared_ptr<std::byte> own,
             int device, const std::vector<DeviceFacts>& facts);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Null for a rank on another host.
  [[nodiscard]] std::byte* block(int rank) const { return blocks_[rank]; }

 private:
  // `ranks` of this host; `reached`: which of them, in that order.
  void share_in_process(const std::vector<int>& ranks, const std::vector<DeviceFacts>& facts,
                        std::vector<bool>& reached);
  void share_between_processes(const std::vector<int>& ranks, std::vector<bool>& reached);

  std::shared_ptr<runtime::Bootstrap> bootstrap_;
  std::shared_ptr<std::byte> own_;
  int device_;
  std::vector<std::shared_ptr<void>> shared_;  // in one process: keeps peers' blocks alive
  std::vector<void*> opened_;                  // between processes
  std::vector<std::byte*> blocks_;             // by rank
  bool abandoned_ = false;
};

}  // namespace tandem::cuda
