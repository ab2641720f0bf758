// From the network to a GPU that it cannot write: rows and words of peers on other hosts land in
// pinned memory of the host and are copied to this rank's device memory, all on one stream and so
// in the order in which they take effect. The copies run beside kernels that wait for them.
//
// Thread safety: as runtime::Carrier; word(), problem() and forget() at any time.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/backend.h"
#include "runtime/network.h"
#include "runtime/waiter.h"

namespace tandem::cuda {

// A stream for copies between this host and the device, beside kernels that wait for them.
cudaStream_t make_copy_stream();

class DeviceCarrier final : public runtime::Carrier {
 public:
  // `block` of this rank is in device memory; `remote` are the ranks on other hosts.
  DeviceCarrier(int device, const runtime::BufferPlan& plan, const std::vector<int>& remote,
                std::shared_ptr<std::byte> block);
  ~DeviceCarrier() override;
  DeviceCarrier(const DeviceCarrier&) = delete;
  DeviceCarrier& operator=(const DeviceCarrier&) = delete;

  std::byte* room(int source, layout::Epoch epoch, std::int64_t size_bytes) override;
  std::byte* landing() override { return landing_.get(); }
  void carry_to_block(const Rows& rows) override;
  void carry_to_landing(std::int64_t offset, std::int64_t size_bytes) override;
  void carry_words(int source, std::int64_t offset, std::span<const layout::Word> words) override;
  void lost(int peer) override;

  // `completed` of a peer says that what this rank sent it may be overwritten, so it is held back
  // while the network has not said the same: `has_left(peer, parity)`. Set before anything comes,
  // and to nothing before it cannot be called any more.
  void set_has_left(std::function<bool(int, int)> has_left);

  // More has left, or come: looks at what is held back, and rings for whoever waits on the host.
  void wake();
  [[nodiscard]] layout::Doorbell& doorbell() { return doorbell_; }

  // Waits until all that has come by now is on the device.
  void await_copies() const;
  // Drops what is held back.
  void forget();

  // Memory that the network reads, which shall live as long as this object.
  void keep(std::shared_ptr<std::byte> memory) { kept_.push_back(std::move(memory)); }

  // In device memory: expert outputs that came back, by parity; per rank, not 0 once it is lost.
  [[nodiscard]] const std::byte* device_landing() const { return device_landing_.get(); }
  [[nodiscard]] std::int64_t landing_bytes() const { return landing_bytes_; }
  [[nodiscard]] const std::uint32_t* device_lost() const { return device_lost_; }

  // The word of a peer that has come last to this offset of the block.
  [[nodiscard]] layout::Word word(std::int64_t offset) const;
  // Why nothing is carried any more, if so.
  [[nodiscard]] std::optional<std::string> problem() const;

 private:
  // Where the rows of one source and parity land.
  struct Room {
    std::byte* memory = nullptr;
    layout::Epoch epoch = 0;
    std::int64_t used = 0;
  };
  struct Source {
    Room rooms[2];
    std::optional<layout::Word> completed;  // held back; under held_mutex_
  };

  void copy(std::byte* to, const std::byte* from, std::int64_t size_bytes);
  void copy_words(std::int64_t offset, std::int64_t size_bytes);
  void release_completed(int source);

  int device_;
  layout::Block layout_;
  std::shared_ptr<std::byte> block_;
  std::int64_t room_bytes_;
  std::int64_t landing_bytes_;
  std::shared_ptr<std::byte> rooms_;  // pinned, as are landing_, words_ and one_
  std::shared_ptr<std::byte> landing_;
  std::shared_ptr<std::byte> words_;  // the peers' control words, at their offsets
  std::shared_ptr<std::byte> one_;    // uint32 1
  std::shared_ptr<std::byte> device_memory_;
  std::shared_ptr<std::byte> device_landing_;
  std::uint32_t* device_lost_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<std::shared_ptr<std::byte>> kept_;
  std::vector<Source> sources_;  // by rank
  layout::Doorbell doorbell_{};
  std::mutex held_mutex_;
  std::function<bool(int, int)> has_left_;  // under it
  mutable std::mutex mutex_;
  std::string problem_;  // under it
};

}  // namespace tandem::cuda
