// One rank's way to peers on other hosts: a thread that does what kernels ask for through the ring
// of requests (request_ring.h), and a carrier for what comes (device_carrier.h). The thread reads
// words and rows where kernels wrote them (outbox.h) and sends them through RemotePeers; expert
// outputs it copies from the combine region into pinned memory first.
//
// A network that can read and write a GPU's memory needs neither that copy nor the carrier: outputs
// could be sent from the region, and RemoteMemory::block be the device's.
//
// Thread safety: check() and why_lost() at any time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/device_carrier.h"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/request_ring.h"
#include "runtime/backend.h"
#include "runtime/network.h"

namespace tandem::cuda {

class Relay {
 public:
  // Collective over the communicator; nothing may be sent before all ranks have returned (a
  // barrier). `own_failure` says what has failed on this rank for good, once it has; the thread
  // asks now and then, and tells the peers.
  Relay(int device, const runtime::BufferPlan& plan, runtime::Bootstrap& bootstrap,
        std::shared_ptr<std::byte> block,
        std::function<std::optional<runtime::Failure>()> own_failure);
  // After the kernels of this rank have ended: what they asked for is done first.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Tells the kernels of this.
  void fill(BufferView& view);
  [[nodiscard]] std::byte* outbox() const { return device_outbox_; }
  void start();

  // Throws what a peer on another host, or the thread, has failed with.
  void check() const;
  [[nodiscard]] std::string why_lost(int peer) const;

 private:
  // What is kept of a dispatch, by parity, until its rows are sent; and, by half, until its
  // combine.
  struct Sent {
    std::array<std::uint32_t, layout::kNumArguments> arguments{};
    std::vector<std::int32_t> counts;  // [E]
  };

  void run();
  void pause(std::chrono::steady_clock::time_point last_work) const;
  void watch();
  void fail(const runtime::Failure& failure, bool is_news);

  void handle(const Request& request);
  void send_header(const Request& request);
  void send_rows(const Request& request);
  void send_outputs(const Request& request);
  void send_ready(const Request& request);
  void send_word(std::int64_t offset, layout::Word word);
  // Where the outputs for each peer's rows will lie in its landing memory.
  void plan_landed(const Request& request);

  template <typename T>
  [[nodiscard]] const T* in_outbox(std::int64_t offset) const {
    return reinterpret_cast<const T*>(outbox_memory_.get() + offset);
  }

  int device_;
  runtime::BufferPlan plan_;
  Outbox outbox_;
  std::vector<int> remote_;           // ranks
  std::shared_ptr<std::byte> block_;  // on the device
  std::function<std::optional<runtime::Failure>()> own_failure_;
  std::shared_ptr<std::byte> outbox_memory_;  // pinned
  std::byte* device_outbox_ = nullptr;        // the same memory, as kernels address it
  std::shared_ptr<std::byte> device_view_;    // a RemoteView
  std::shared_ptr<std::byte> bounce_;         // pinned: outputs on their way, by parity
  std::int64_t bounce_bytes_ = 0;
  std::shared_ptr<std::byte> one_;  // pinned: uint32 1
  std::uint32_t* device_failed_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<DeviceCarrier> carrier_;
  std::unique_ptr<runtime::RemotePeers> peers_;
  RequestReader reader_;

  std::array<Sent, 2> sent_;
  std::array<std::vector<std::int64_t>, layout::kNumHalves> landed_;  // [L, R]

  mutable std::mutex mutex_;
  std::optional<runtime::Failure> failure_;  // told by others, or of the thread itself
  bool has_told_ = false;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace tandem::cuda
