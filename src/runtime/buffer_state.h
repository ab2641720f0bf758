// What stands behind a tandem::Buffer: validation, the bookkeeping of halves and hooks, and the
// backend's end of the buffer, which does the work.
//
// Thread safety: as Buffer's; one caller at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/validation.h"
#include "runtime/backend.h"
#include "runtime/bootstrap.h"
#include "runtime/door.h"
#include "runtime/sequence.h"
#include "tandem/buffer.h"

namespace tandem::runtime {

class BufferState;

// What a DispatchHandle refers to.
struct HandleState {
  std::weak_ptr<BufferState> buffer;
  DispatchId dispatch;
  DispatchCall call;
  core::ResultRows rows;       // of the result
  bool failed = false;         // its receive phase was refused (kCapacity)
  std::vector<bool> active{};  // by rank, when the last phase of its dispatch or combine ended
};

class BufferState : public std::enable_shared_from_this<BufferState> {
 public:
  BufferState(const Communicator& communicator, const BufferOptions& options,
              Faults* faults = nullptr);
  // Of a process that joins a running buffer: one of this host, or the one whose door an address
  // leads to.
  BufferState(int rank, const BufferOptions& options, Faults* faults = nullptr);
  struct Entrance {
    std::string address;
    std::string secret;
  };
  BufferState(int rank, const BufferOptions& options, const Entrance& entrance,
              Faults* faults = nullptr);

  [[nodiscard]] const BufferPlan& plan() const { return plan_; }
  [[nodiscard]] int num_local_experts() const { return plan_.experts.num_local(plan_.rank); }

  DispatchResult dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                          const DispatchOptions& options);
  TensorView next_combine_buffer(const DispatchHandle& handle, DType dtype);
  Hook combine(const ConstTensorView& y, const ConstTensorView& topk_weights,
               const DispatchHandle& handle, const TensorView& out, const CombineOptions& options);
  void check();
  void mask(int rank);
  void unmask(int rank);
  std::vector<bool> recover();
  [[nodiscard]] std::vector<bool> active() const { return backend_->active(); }
  [[nodiscard]] std::vector<bool> participants_of(const HandleState& handle) {
    return backend_->participants_of(handle.call, handle.active);
  }
  [[nodiscard]] std::vector<int> waiting() const { return backend_->waiting(); }
  [[nodiscard]] std::optional<Error> last_loss() const { return backend_->last_loss(); }
  [[nodiscard]] void* last_event() const { return backend_->last_event(); }

  // For tests that make this rank fail (faults.h).
  [[nodiscard]] BackendBuffer& backend_end() { return *backend_; }

  // See recorder.h.
  void reserve_unwritten(const DispatchHandle& handle);

 private:
  HandleState& require_handle(const DispatchHandle& handle) const;
  [[nodiscard]] DispatchResult make_result(const std::shared_ptr<HandleState>& handle) const;
  [[nodiscard]] TensorView combine_view(const HandleState& handle, DType dtype,
                                        std::int64_t hidden) const;
  [[nodiscard]] bool lies_in_combine_region(const ConstTensorView& y) const;

  // Runs `action`; an error that leaves the protocol in doubt fails the buffer for good.
  template <typename Action>
  void guarded(Action&& action);
  void require_sound() const;
  void require_rank(int rank) const;
  [[nodiscard]] static Offer find_offer(int rank, const BufferOptions& options);
  [[nodiscard]] static Offer find_offer(int rank, const BufferOptions& options,
                                        const Entrance& entrance);
  void open_door();

  // A hook that runs `receive` as the receive phase of `operation`.
  template <typename Receive>
  Hook make_hook(std::uint64_t operation, Receive receive);

  BufferPlan plan_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<Door> door_;  // if others may join
  std::unique_ptr<BackendBuffer> backend_;
  Sequence sequence_;
  std::optional<Error> failure_;
};

// The part of making a buffer that needs no peers: validates, and lays out the memory.
// `num_present`: ranks that are there from the beginning.
BufferPlan make_plan(const BufferOptions& options, int rank, int num_present);

}  // namespace tandem::runtime
