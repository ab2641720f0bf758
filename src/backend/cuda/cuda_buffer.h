// One rank's end of a buffer on a GPU: memory, launches, and the record of what went wrong. The
// protocol itself is in the kernels.
//
// No call after the constructor allocates or synchronises the device: a peer rank on the same GPU
// may be waiting for this rank's next launch.
//
// Thread safety: one caller at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/cuda/device_memory.h"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/relay.h"
#include "runtime/backend.h"

namespace tandem::cuda {

class CudaBuffer final : public runtime::BackendBuffer {
 public:
  CudaBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap, const runtime::BufferPlan& plan);
  ~CudaBuffer() override;

  void dispatch(const runtime::DispatchCall& call, runtime::Stage stage) override;
  void combine(const runtime::CombineCall& call, runtime::Stage stage) override;
  void acquire_combine_half(int half) override;
  [[nodiscard]] std::byte* own_block() override { return peers_->block(plan_.rank); }
  [[nodiscard]] runtime::HandleArrays handle_arrays(int half) override;
  void check() override;
  // Not here yet: kUnsupported.
  void mask(int rank) override;
  void unmask(int rank) override;
  void recover() override;
  [[nodiscard]] std::vector<bool> active() const override {
    return std::vector<bool>(plan_.num_ranks, true);
  }
  [[nodiscard]] runtime::Offer offer() const override;
  [[nodiscard]] std::vector<bool> participants() const override { return active(); }
  [[nodiscard]] void* last_event() const override { return last_event_; }

 private:
  // What a rank needs of its own beside the block, in one allocation.
  struct Pieces;

  void allocate();
  void fill_tables();
  void choose_blocks(const std::vector<DeviceFacts>& facts);
  void warm_up();

  [[nodiscard]] int blocks_for(int asked) const;
  [[nodiscard]] DispatchParams dispatch_params(const runtime::DispatchCall& call,
                                               int num_blocks) const;
  [[nodiscard]] CombineParams combine_params(const runtime::CombineCall& call,
                                             int num_blocks) const;
  void launch(const void* kernel, const void* params, int num_blocks, void* stream);
  void follow(cudaStream_t stream);
  void leave(cudaStream_t stream);
  void print_trace() const;
  [[noreturn]] void throw_record(const ErrorRecord& record) const;
  [[nodiscard]] std::optional<runtime::Failure> fatal_failure() const;

  runtime::BufferPlan plan_;
  int device_ = 0;
  int num_sms_ = 0;
  int default_blocks_ = 1;
  int most_blocks_ = 1;  // of a kernel, so that the kernels of all ranks here fit side by side
  std::int64_t shared_bytes_ = 0;  // of every block

  std::shared_ptr<std::byte> block_;
  std::shared_ptr<std::byte> own_memory_;
  std::shared_ptr<std::byte> record_memory_;
  std::unique_ptr<PeerMemory> peers_;
  std::unique_ptr<Relay> relay_;  // null where all ranks share memory
  BufferView view_;               // as the kernels get it
  ErrorRecord* record_ = nullptr;
  mutable std::mutex record_mutex_;  // while a record is read, none is allowed to follow it

  bool combined_[layout::kNumHalves] = {};           // since the half's dispatch
  void* dispatch_streams_[layout::kNumHalves] = {};  // of the halves' dispatches
  cudaStream_t last_stream_ = nullptr;
  bool last_was_captured_ = false;
  cudaEvent_t last_event_ = nullptr;  // recorded behind the last call; events_ take turns
  std::array<cudaEvent_t, 4> events_{};
  std::size_t next_event_ = 0;
  cudaStream_t reset_stream_ = nullptr;  // clears the device's side of the error record
};

}  // namespace tandem::cuda
