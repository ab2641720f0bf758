// One rank's way to peers on other hosts: a thread that does what kernels ask for through the ring
// of requests (request_ring.h), and a carrier for what comes (device_carrier.h). The thread reads
// words and rows where kernels wrote them (outbox.h) and sends them through RemotePeers; expert
// outputs it copies from the combine region into pinned memory first.
//
// A network that can read and write a GPU's memory needs neither that copy nor the carrier: outputs
// could be sent from the region, and RemoteMemory::block be the device's.
//
// Who takes part is decided beside it, through the same RemotePeers: peers() is for the caller's
// thread.
//
// Thread safety: trouble(), why_lost() and set_newest_view() at any time, the rest by one caller.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/device_carrier.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/request_ring.h"
#include "backend/cuda/roster_words.h"
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

  [[nodiscard]] runtime::RemotePeers& peers() { return *peers_; }
  // Rung when something has come for whoever waits on the host.
  [[nodiscard]] layout::Doorbell& doorbell() { return carrier_->doorbell(); }
  // By what the thread knows who takes part. Null: from now on by what it knows.
  void set_newest_view(std::function<runtime::View()> newest_view);

  // What the thread itself has failed with.
  [[nodiscard]] std::optional<runtime::Failure> trouble() const;
  [[nodiscard]] std::string why_lost(int peer) const;

  // Writes a roster word into the blocks of all ranks on other hosts, before anything that is sent
  // later takes effect there.
  void tell_roster_word(int rank, layout::Word word);

  // Until what has come by now is on the device.
  void await_copies() const { carrier_->await_copies(); }

  // No kernel of this rank is at work, or will be until resume(). Does what they have asked for;
  // from then on nothing that peers send of operations before `from` reaches the block.
  void rest(layout::Epoch from);
  // While it rests: until the network has read what it was given for `active`. Throws kTimeout.
  void await_leaving(std::span<const int> active) const;
  // Kernels may be launched again.
  void resume();

 private:
  // What is kept of a dispatch, by parity, until its rows are sent; and, by half, until its
  // combine.
  struct Sent {
    std::array<std::uint32_t, layout::kNumArguments> arguments{};
    std::vector<std::int32_t> counts;  // [E]
  };

  void run();
  // One turn of the thread; was there something to do?
  [[nodiscard]] bool work();
  void pause(std::chrono::steady_clock::time_point last_work) const;
  void watch();
  void fail(const std::string& what);
  void close_to(layout::Epoch from);
  void stop_kernels();

  void handle(const Request& request);
  void send_header(const Request& request);
  void send_rows(const Request& request);
  void send_outputs(const Request& request);
  void send_ready(const Request& request);
  void send_arrived(layout::Epoch epoch);
  void send_completed(layout::Epoch epoch);
  void send_words(layout::Epoch epoch, std::span<const runtime::RemotePeers::WordRun> runs);
  [[nodiscard]] bool takes_part(int peer, layout::Epoch epoch);
  // Where the outputs for each peer's rows will lie in its landing memory.
  void plan_landed(const Request& request);

  template <typename T>
  [[nodiscard]] const T* in_outbox(std::int64_t offset) const {
    return reinterpret_cast<const T*>(outbox_memory_.get() + offset);
  }

  FreeingWhenIdle freeing_when_idle_;  // the longest of all members
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

  std::mutex turn_;  // over what follows: a turn of the thread, or a caller's
  RequestReader reader_;
  std::array<Sent, 2> sent_;
  std::array<std::vector<std::int64_t>, layout::kNumHalves> landed_;  // [L, R]
  std::function<runtime::View()> newest_view_;
  runtime::View view_;  // as known last
  Audience audience_;
  layout::Epoch gate_;  // messages of operations before are dropped, where rest() was called
  bool is_resting_ = false;
  bool has_told_ = false;     // peers of a failure here
  bool has_stopped_ = false;  // this rank's kernels

  mutable std::mutex mutex_;
  std::optional<runtime::Failure> trouble_;  // under it
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace tandem::cuda
