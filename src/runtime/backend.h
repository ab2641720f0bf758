// What a backend provides, and what it is given: every call arrives validated, with the half
// chosen. A new backend implements these two classes and adds one line to registry.cc.
// docs/adding_a_backend.md walks through it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/expert_map.h"
#include "layout/block.h"
#include "runtime/bootstrap.h"
#include "runtime/door.h"
#include "runtime/faults.h"
#include "runtime/recorder.h"
#include "tandem/buffer.h"
#include "tandem/info.h"
#include "tandem/tensor.h"

namespace tandem::runtime {

// Everything about a buffer that is fixed when it is made.
struct BufferPlan {
  BufferOptions options;  // validated; the same on all ranks where buffer.h says so
  int rank = 0;
  int num_ranks = 1;
  core::ExpertMap experts;
  layout::Block block;
  Faults* faults = nullptr;  // of a test; they outlive the buffer
};

// Which phases of an operation to run. Without a hook both run as one.
enum class Stage : std::uint8_t { kSend = 1, kReceive = 2, kBoth = 3 };

inline bool sends(Stage stage) { return (static_cast<int>(stage) & 1) != 0; }
inline bool receives(Stage stage) { return (static_cast<int>(stage) & 2) != 0; }

struct DispatchCall {
  ConstTensorView x;         // [T, H]
  ConstTensorView topk_idx;  // [T, K]
  layout::RowShape row;
  std::int32_t num_tokens = 0;
  std::int32_t topk = 0;
  std::int32_t max_tokens = 0;               // M of the call
  Placement placement = Placement::kPacked;  // never kAutomatic
  Layout layout = Layout::kPadded;
  std::int32_t row_alignment = 1;
  ConstTensorView topk_weights;  // [T, K] float32; given, its combine goes by partial sums
  int half = 0;                  // of the view, the handle's arrays and, later, the combine region
  std::uint64_t id = 0;    // of the dispatch on this rank; the combine of its handle says it again
  TensorView recv_x;       // kSlotted: row-major
  TensorView recv_scales;  // kSlotted, fp8
  void* stream = nullptr;
  int num_sms = 0;  // 0: the backend's default

  [[nodiscard]] bool partial_sums() const { return topk_weights.has_value(); }
};

struct CombineCall {
  ConstTensorView y;  // in the combine region if zero_copy
  bool zero_copy = false;
  ConstTensorView weights;  // [T, K] float32; none where the dispatch has them
  TensorView out;           // [T, H]
  DType dtype = DType::kBFloat16;
  std::int32_t hidden = 0;
  DispatchCall dispatch;  // what the handle's dispatch was called with (of tensors don't read what
                          // they refer to)
  void* stream = nullptr;
  int num_sms = 0;
};

// Arrays that belong to a handle, in memory of the backend, one set per half.
struct HandleArrays {
  std::int32_t* counts = nullptr;   // [L]
  std::int64_t* offsets = nullptr;  // [L + 1]
  std::int64_t* ranges = nullptr;   // [L, R]
  std::int32_t* source_tokens =
      nullptr;  // [rows]; for slotted placement (packed: in the view region)
};

// A rank's end of a buffer.
class BackendBuffer {
 public:
  virtual ~BackendBuffer() = default;

  // Run the phases of `stage`; for kBoth and kReceive, on return (CPU) or once the stream has got
  // there (GPU) the results are complete. A send and its receive are given the same call.
  // Operations arrive in order; at most two sends are ahead of their receives, and receives keep
  // the order of sends.
  virtual void dispatch(const DispatchCall& call, Stage stage) = 0;
  virtual void combine(const CombineCall& call, Stage stage) = 0;

  // Makes sure that peers have read what the combine region of `half` last carried, so that the
  // caller may write there (rule 2 of docs/design.md). On a GPU: work queued later on the
  // dispatch's stream.
  virtual void acquire_combine_half(int half) = 0;

  [[nodiscard]] virtual std::byte* own_block() = 0;
  [[nodiscard]] virtual HandleArrays handle_arrays(int half) = 0;

  // Throws the error of an operation that has failed, if one has.
  virtual void check() = 0;

  // Losing ranks and finding them again: as Buffer's of the same names. recover leaves the backend
  // as it was when made, but for the epoch.
  virtual void mask(int rank) = 0;
  virtual void unmask(int rank) = 0;
  virtual void recover() = 0;
  [[nodiscard]] virtual std::vector<bool> active() const = 0;
  // By rank: who took part in the operation whose phase has run last.
  [[nodiscard]] virtual std::vector<bool> participants() const = 0;
  // Who took part in a dispatch, or in its combine if that came since. `noted`: what participants()
  // said when it was called. On a GPU that is known only once it has run, which this waits for.
  [[nodiscard]] virtual std::vector<bool> participants_of(const DispatchCall&,
                                                          std::vector<bool> noted) {
    return noted;
  }
  [[nodiscard]] virtual std::optional<Error> last_loss() const { return {}; }

  // Ranks that wait to be let in.
  [[nodiscard]] virtual std::vector<int> waiting() const { return {}; }
  // What a process needs that is to become a rank of this buffer; the options are filled in by the
  // caller. kUnsupported where that cannot be.
  [[nodiscard]] virtual Offer offer() const = 0;

  // Buffer::last_event.
  [[nodiscard]] virtual void* last_event() const { return nullptr; }
};

class BackendInterface {
 public:
  virtual ~BackendInterface() = default;
  [[nodiscard]] virtual Backend backend() const = 0;
  [[nodiscard]] virtual BackendInfo info() const = 0;
  [[nodiscard]] virtual int num_arrival_words() const = 0;  // layout::Capacity's
  [[nodiscard]] virtual std::unique_ptr<BackendBuffer> make_buffer(
      const std::shared_ptr<Bootstrap>& bootstrap, const BufferPlan& plan) const = 0;
  // The end of a process that is to become a rank of a running buffer, which recover() then lets
  // in.
  [[nodiscard]] virtual std::unique_ptr<BackendBuffer> join_buffer(const BufferPlan& plan,
                                                                   Offer offer) const = 0;
  // Memory for tandem::Array, and copies for tandem::copy (contiguous runs of bytes).
  [[nodiscard]] virtual std::shared_ptr<void> allocate(std::int64_t size_bytes,
                                                       int device) const = 0;
  virtual void copy_2d(void* destination, std::int64_t destination_pitch, const void* source,
                       std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
                       void* stream) const = 0;
  // For measuring and checking: the calling thread's device where none is named is from now on the
  // `number`-th, counted round and round. Nothing where there are no devices to choose from.
  virtual void use_device(int number) const = 0;
  [[nodiscard]] virtual std::unique_ptr<Recorder> make_recorder(int device) const = 0;
};

// The backends of this build. Throws kUnsupported, saying why, for one that is missing.
std::span<const BackendInterface* const> registered_backends();
const BackendInterface& backend(Backend which);

}  // namespace tandem::runtime
