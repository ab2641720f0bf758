// One rank's end of a buffer on a GPU: memory, launches, and the record of what went wrong. The
// protocol itself is in the kernels.
//
// No call after the constructor allocates or synchronises the device: a peer rank on the same GPU
// may be waiting for this rank's next launch. mask, unmask, recover and participants_of wait for
// this rank's own operations.
//
// Thread safety: one caller at a time. Where ranks that miss the timeout are masked, a thread of
// the buffer's own looks after this rank's kernels (cuda_buffer_watch.cc).
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "backend/cuda/announcement.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/kernel_params.h"
#include "backend/cuda/late_ranks.h"
#include "backend/cuda/relay.h"
#include "backend/cuda/settlement.h"
#include "runtime/backend.h"
#include "runtime/roster.h"
#include "tandem/error.h"

namespace tandem::cuda {

class CudaBuffer final : public runtime::BackendBuffer {
 public:
  CudaBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap, const runtime::BufferPlan& plan);
  // Of a process that joins a running buffer; recover() lets it in.
  CudaBuffer(const runtime::BufferPlan& plan, runtime::Descriptor board);
  ~CudaBuffer() override;

  void dispatch(const runtime::DispatchCall& call, runtime::Stage stage) override;
  void combine(const runtime::CombineCall& call, runtime::Stage stage) override;
  void acquire_combine_half(int half) override;
  [[nodiscard]] std::byte* own_block() override { return peers_->block(plan_.rank); }
  [[nodiscard]] runtime::HandleArrays handle_arrays(int half) override;
  void check() override { check(runtime::Stage::kReceive); }
  void mask(int rank) override;
  void unmask(int rank) override;
  void recover() override;
  [[nodiscard]] std::vector<bool> active() const override;
  // As far as is known when the operation is queued; participants_of knows better.
  [[nodiscard]] std::vector<bool> participants() const override { return active(); }
  [[nodiscard]] std::vector<bool> participants_of(const runtime::DispatchCall& dispatch,
                                                  std::vector<bool> noted) override;
  [[nodiscard]] std::optional<Error> last_loss() const override;
  [[nodiscard]] std::vector<int> waiting() const override;
  [[nodiscard]] runtime::Offer offer() const override;
  [[nodiscard]] void* last_event() const override { return last_event_; }

 private:
  // What a rank needs of its own beside the block, in one allocation.
  struct Pieces;
  struct Staging;
  struct Shared;

  // --- cuda_buffer_setup.cc ---
  void require_supported(const runtime::Bootstrap* bootstrap) const;
  [[nodiscard]] DeviceFacts prepare_device();
  void allocate();
  void fill_control(layout::Epoch before);
  void fill_tables(layout::Epoch first);
  void choose_blocks(const DeviceFacts& own, const std::vector<DeviceFacts>& facts);
  void make_roster(std::unique_ptr<runtime::Membership> membership);
  void warm_up();

  // --- cuda_buffer_roster.cc; all but the first two with mutex_ locked ---
  // Before a phase is queued.
  void check(runtime::Stage stage);
  [[nodiscard]] DeviceState read_state();
  [[nodiscard]] std::optional<ErrorRecord> take_record();
  [[noreturn]] void throw_record(const ErrorRecord& record) const;
  [[nodiscard]] std::optional<runtime::Failure> fatal_failure() const;
  void allocate_staging();
  void copy_words(std::byte* to, const void* from, std::int64_t size_bytes);
  void finish_copies();
  [[nodiscard]] layout::Word& staging_word();
  void await_last_call();
  [[nodiscard]] DeviceState load_state();
  [[nodiscard]] DeviceState first_state(layout::Epoch epoch, std::uint32_t generation) const;
  [[nodiscard]] std::vector<layout::Word> read_words(const void* from, int num_words);
  [[nodiscard]] std::vector<layout::Word> read_roster();
  [[nodiscard]] layout::Word pending_word(int rank) const;
  void tell_change(int rank, const runtime::Context& next);
  void write_roster_word(int rank);
  void write_roster(const runtime::Context& next);
  void write_roster_words();
  void stop_if_failed();
  void require_settled(int rank, layout::Epoch next);
  void await_roster(const runtime::Context& first);
  void write_own_roster();
  void start_together(const runtime::Context& first, const runtime::View& then);
  [[nodiscard]] bool meet(int rank);

  [[nodiscard]] bool has_door() const { return !plan_.options.door.empty(); }
  [[nodiscard]] bool is_watched() const { return has_watch(variant_); }

  // --- cuda_buffer_watch.cc; all but the first three with mutex_ locked ---
  void allocate_watch();
  void start_watch();
  void watch(const std::stop_token& stop);
  void look_after_kernels();
  void take_notes(LateRanks::Time now);
  void mask_late(LateRanks::Time now);
  [[nodiscard]] std::uint32_t load_at_work(int rank);
  void halt(int rank);
  [[nodiscard]] bool is_at_rest(int rank);
  [[nodiscard]] bool come_to_rest();
  void bring_to_rest(int rank, const runtime::Context& context);
  void resume();
  [[nodiscard]] layout::Epoch settle_announcements(int rank);
  void copy_announcement(int holder, int parity, int source, cudaMemcpyKind kind);
  [[nodiscard]] Announcement staged_announcement(int holder) const;

  // --- cuda_buffer_settle.cc ---
  void settle_losses(LateRanks::Time now);
  [[nodiscard]] Holding holding_of(int lost);
  void mask_silent(const runtime::Envoy::Losses& losses, LateRanks::Time now);
  void go_by_settlement();

  // --- cuda_buffer.cc ---
  [[nodiscard]] int blocks_for(int asked) const;
  [[nodiscard]] DispatchParams dispatch_params(const runtime::DispatchCall& call,
                                               int num_blocks) const;
  [[nodiscard]] CombineParams combine_params(const runtime::CombineCall& call,
                                             int num_blocks) const;
  void launch(const void* kernel, const void* params, int num_blocks, void* stream,
              int num_threads = kNumThreads);
  void follow(cudaStream_t stream);
  void leave(cudaStream_t stream);
  void print_trace() const;

  runtime::BufferPlan plan_;
  Variant variant_ = Variant::kPlain;  // of its kernels
  int device_ = 0;
  int num_sms_ = 0;
  std::int64_t cache_bytes_ = 0;  // of L2
  std::int64_t cache_share_ = 0;  // what rows of a dispatch may take of half of it
  int default_blocks_ = 1;
  int most_blocks_ = 1;  // of a kernel, so that the kernels of all ranks here fit side by side
  std::int64_t shared_bytes_ = 0;  // of every block

  std::shared_ptr<std::byte> block_;
  std::shared_ptr<std::byte> own_memory_;
  std::shared_ptr<std::byte> record_memory_;
  std::shared_ptr<std::byte> staging_memory_;
  std::unique_ptr<PeerMemory> peers_;
  std::unique_ptr<Relay> relay_;  // null where all ranks share memory
  BufferView view_;               // as the kernels get it
  ErrorRecord* record_ = nullptr;
  mutable std::mutex record_mutex_;  // while a record is read, none is allowed to follow it
  mutable std::mutex mutex_;         // of the roster, the staging memory and the side stream
  Staging* staging_ = nullptr;
  layout::Doorbell doorbell_{};  // of one host. Nobody rings: hosts meet when operations have
                                 // failed, and look often enough
  std::unique_ptr<runtime::Roster> roster_;

  bool combined_[layout::kNumHalves] = {};           // since the half's dispatch
  void* dispatch_streams_[layout::kNumHalves] = {};  // of the halves' dispatches
  cudaStream_t last_stream_ = nullptr;
  bool last_was_captured_ = false;
  cudaEvent_t last_event_ = nullptr;  // recorded behind the last call; events_ take turns
  std::array<cudaEvent_t, 4> events_{};
  std::size_t next_event_ = 0;
  cudaStream_t side_stream_ = nullptr;  // of copies that no operation may hold up

  // Where ranks that miss the timeout are masked.
  std::shared_ptr<std::byte> shared_memory_;  // pinned
  Shared* shared_ = nullptr;
  std::optional<LateRanks> late_;
  std::uint32_t judged_by_ = 0;  // the view by which it was last looked who is late
  bool says_it_waits_ = false;   // on the board
  // Across hosts, numbers of decisions: of the loss for which this rank has told its holdings last,
  // and when; of the settlement that it goes by.
  std::uint32_t told_losses_ = 0;
  LateRanks::Time told_losses_at_{};
  std::uint32_t settled_ = 0;
  Watch watch_view_;  // as the kernels get it
  std::jthread watcher_;
};

}  // namespace tandem::cuda
