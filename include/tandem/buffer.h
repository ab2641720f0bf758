// Buffer: symmetric memory on every rank, and the two operations on it.
//
//   tandem::Buffer buffer(communicator, {.num_experts = 64, .max_tokens = 128, .max_hidden = 7168,
//                                        .max_topk = 8});
//   tandem::DispatchResult received = buffer.dispatch(x, topk_idx);
//   tandem::TensorView y = buffer.next_combine_buffer(received.handle, tandem::DType::kBFloat16);
//   ... run each local expert on its rows of received.x, writing to the same rows of y ...
//   buffer.combine(y, topk_weights, received.handle, out);
//
// Symbols: R ranks, E experts, L = experts on this rank, T tokens on this rank (T may differ per
// rank and may be 0), M = max tokens per rank, K = top-k, H = hidden size.
//
// Order. The operations on one buffer are one sequence, the same on every rank. Calls on one buffer
// from several threads need the caller's lock; different buffers are independent.
//
// Errors. Wrong arguments are refused by an Error with kInvalidArgument before anything is sent,
// and the buffer stays usable; so with kOrder, kStaleHandle and (on every rank alike) kCapacity.
// After kTimeout, kPeerLost or kMismatch the buffer is failed on every rank: all get the same error
// in that or their next operation, and every later call repeats it as kFailedBuffer, until all have
// called recover(). A failed buffer can be destroyed; nothing is left behind.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/tensor.h"
#include "tandem/types.h"

namespace tandem {

namespace runtime {
class BufferState;
struct HandleState;
}  // namespace runtime

// Fixed when the buffer is made; must agree on all ranks (disagreement is kMismatch on all of them,
// with rank and values), except where noted.
struct BufferOptions {
  Backend backend = Backend::kCpu;
  int num_experts = 1;    // E, over all ranks; at least 1
  int max_tokens = 128;   // M: the most tokens that any rank dispatches in one call; at least 1
  int max_hidden = 7168;  // the largest H; 1 to kMaxHidden
  int max_topk = 8;       // the largest K; 1 to kMaxTopk

  // The widest rows that may be dispatched and combined: kFloat32 makes the memory twice that of
  // kBFloat16. Every format whose rows are no wider is allowed (fp8 always).
  Format widest_format = Format::kBFloat16;

  // Rank that owns each expert, [E]. Empty: contiguous, as even as possible, the first E % R ranks
  // owning one more. A rank may own none. Local experts are numbered in the order of their ids.
  std::vector<int> expert_owners = {};

  // What the buffer is for. Regions of memory that the options exclude are not allocated.
  bool packed_placement = true;
  bool slotted_placement = true;
  bool combine = true;
  bool padded_layout = true;  // false: only Layout::kPacked, for a fraction of the memory

  // Rows of the view and of the combine region, in each half. 0: the worst case, R * M * min(K,
  // Lmax), or Lmax * R * M where the padded layout is allowed (Lmax = the most experts on one
  // rank). A dispatch that does not fit is refused on all ranks alike with kCapacity, nothing
  // written.
  std::int64_t capacity_rows = 0;

  // The longest any wait may take; may differ per rank. kForever: no limit.
  static constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);

  // What becomes of an operation in which a rank misses the timeout (docs/failures.md).
  OnTimeout on_timeout = OnTimeout::kFail;

  // Processes may join the buffer later, under this name, any text. Empty: nobody may. Where all
  // ranks are on one host: processes of this user (Buffer::join), and one buffer at a time has a
  // name. On CPUs of several hosts: Buffer::join_across_hosts, one such buffer of a communicator.
  // On GPUs of one host where ranks are processes and on_timeout is kMask.
  std::string door = {};
  // Where ranks are on several hosts: "host:port" where this rank, and one that joins, can be asked
  // by such a process, which needs to know one of them. Empty: it cannot. May differ per rank.
  std::string door_address = {};
  // As for door: ranks that there may ever be; experts and memory are shared out among that many.
  // Ranks beyond those of the communicator count as masked until they join. 0: as many as it has.
  int max_ranks = 0;

  int num_threads = 1;  // CPU: threads that this rank works with; may differ per rank

  int device = -1;  // CUDA: device of this rank, -1: the current one; may differ per rank
  // CUDA: multiprocessors for operations that do not say. 0: a share of the device, its number
  // divided by the ranks on it, rounded down to a multiple of 8 from 16 on. Refused on all ranks if
  // those on one device ask for more than it has: their kernels wait for each other.
  int num_sms = 0;

  // The first operation's epoch. For tests of the wrap-around of 32-bit epochs; leave it alone.
  std::uint32_t first_epoch = 1;
};

// Runs an operation's receive phase. Empty where the operation was called without a hook. Copies
// share one state: the phase runs once, later calls do nothing. Hooks of one buffer run in the
// order of their operations (kOrder otherwise). The tensors given to the operation must live until
// then.
class Hook {
 public:
  Hook() = default;
  explicit Hook(std::function<void()> run) : run_(std::move(run)) {}
  explicit operator bool() const { return static_cast<bool>(run_); }
  void operator()() const {
    if (run_) run_();
  }

 private:
  std::function<void()> run_;
};

// Ties a combine to its dispatch. A handle, and with it everything that its dispatch returned,
// stays valid until a later dispatch takes its half of the buffer: not before the next operation
// but one, and not while its own combine has not been called, unless a second dispatch comes first.
// A handle older than that is refused with kStaleHandle.
class DispatchHandle {
 public:
  DispatchHandle() = default;
  explicit DispatchHandle(std::shared_ptr<runtime::HandleState> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }
  [[nodiscard]] const std::shared_ptr<runtime::HandleState>& state() const { return state_; }

  // Who took part, by rank, as of the last phase of its dispatch or combine that has run on this
  // rank: false for a rank that was masked then, also one that was lost in that very phase.
  // On a GPU it waits until this rank's last call has run.
  [[nodiscard]] std::vector<bool> active() const;

 private:
  std::shared_ptr<runtime::HandleState> state_;
};

struct DispatchOptions {
  Format format = Format::kBFloat16;
  Placement placement = Placement::kAutomatic;
  Layout layout = Layout::kPadded;
  int row_alignment =
      1;               // kPacked layout: each expert's first row is a multiple of this; at least 1
  int max_tokens = 0;  // M of this call, the same on every rank; 0: the buffer's
  bool return_hook = false;

  // [T, K] float32, row-major: this dispatch's combine is made of partial sums. Weights travel with
  // tokens, and each rank adds up what its experts give to a token, so that between hosts one row
  // per token and rank goes home instead of one per expert. On every rank or on none. See combine
  // for the sum, which is rounded once more and depends on who owns which expert. CPU ranks only
  // (kUnsupported).
  ConstTensorView topk_weights = {};

  // kSlotted placement: where the receive phase puts rows and, for fp8, scales. Shapes as those of
  // DispatchResult, rows without gaps inside; refused with kPacked placement, required with
  // kSlotted.
  TensorView recv_x = {};
  TensorView recv_scales = {};

  // CUDA: a cudaStream_t. Null is the calling thread's own default stream (cudaStreamPerThread),
  // not the legacy one, on which ranks that are threads would queue behind each other.
  void* stream = nullptr;
  int num_sms = 0;  // CUDA: 0: the buffer's; more than the buffer's or a fair share is cut to that
};

// What arrived at this rank. With a hook, valid once the hook has run. All but x and scales lie in
// memory of the buffer and live as long as the handle is valid; x and scales do too under kPacked
// placement, and are recv_x and recv_scales under kSlotted.
struct DispatchResult {
  TensorView x;  // value dtype of the format; [L, R * M, H] or [rows, H] with rows = capacity
  TensorView
      scales;  // fp8 only. float32 [.., ceil(H / 128)]; kFp8Ue8m0: int32 [.., ceil(H / 512)],
               // group g in byte g % 4 (little end first) of word g / 4, spare bytes 0
  TensorView counts;   // int32 [L]: rows received for each local expert
  TensorView offsets;  // int64 [L + 1]: first row of each expert in x taken as [rows, H]; the last
                       // entry is the end of the last expert's space
  TensorView ranges;  // int64 [L, R]: rows of local expert l from rank r: count in the low 32 bits,
                      // first row, counted from offsets[l], in the high 32 bits
  TensorView source_tokens;  // int32 [rows]: index on its source rank of each row's token; rows as
                             // in x taken as [rows, H]; undefined in rows that hold no token
  DispatchHandle handle;
  Hook hook;  // empty unless return_hook
};

struct CombineOptions {
  bool return_hook = false;
  void* stream = nullptr;  // CUDA: a cudaStream_t
  int num_sms = 0;         // CUDA: 0: the buffer's
};

class Buffer {
 public:
  // Collective. Allocates, maps and checks everything; no later call allocates symmetric memory.
  // Throws kInvalidArgument (an option out of range), kMismatch (options differ: which, where, both
  // values), kUnsupported (backend not built or no device), kUnreachable (naming all pairs that
  // cannot reach each other), kResource (bytes asked and available), kTimeout (naming the missing
  // ranks).
  Buffer(const Communicator& communicator, const BufferOptions& options);
  explicit Buffer(std::shared_ptr<runtime::BufferState> state) : state_(std::move(state)) {}
  ~Buffer();
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Bytes of symmetric memory that a buffer with these options takes on each of num_ranks ranks:
  // exactly what is allocated. Throws kInvalidArgument like the constructor.
  [[nodiscard]] static std::int64_t size_bytes(const BufferOptions& options, int num_ranks);

  [[nodiscard]] const BufferOptions& options() const;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;                   // with those that may yet join
  [[nodiscard]] int num_local_experts() const;           // L
  [[nodiscard]] std::vector<int> local_experts() const;  // ids of this rank's experts, ascending
  [[nodiscard]] std::int64_t capacity_rows() const;

  // Sends each token to the owners of its experts and receives the tokens of this rank's experts.
  //   x         [T, H] of the dtype that the format asks for; rows may be strided, channels may not
  //   topk_idx  [T, K] int32 or int64, row-major; negative selects nothing; a repeated expert is
  //   two rows
  // Refused: T > M, H > max_hidden, K > max_topk, an index >= E (naming the token), other dtypes.
  DispatchResult dispatch(ConstTensorView x, ConstTensorView topk_idx,
                          const DispatchOptions& options = {});

  // The memory that peers will read this handle's expert outputs from: a view [.., H] in the shape
  // of the dispatch's x, with `dtype` (bf16, fp16 or fp32). Writing y there and giving the same
  // view to combine copies nothing. Reserves the handle's half until its combine. Calling it again
  // gives the same view. Throws kStaleHandle, kInvalidArgument (dtype wider than the buffer's
  // widest format).
  TensorView next_combine_buffer(const DispatchHandle& handle, DType dtype);

  // Sends expert outputs home: out[t] = sum over k of topk_weights[t, k] * y(row of token t's k-th
  // expert), in float32, products and sums each rounded, in the order of k, then rounded to out's
  // dtype. Unselected k contribute nothing; a token that selected nothing gives zeros.
  //   y             the view from next_combine_buffer (zero-copy), or any tensor of that shape
  //                 (staged)
  //   topk_weights  [T, K] float32, row-major: T and K of the dispatch, else refused
  //   out           [T, H] of y's dtype; rows may be strided
  // After a dispatch with topk_weights it is the sum of the same products by rank: of each rank
  // those of its experts, as above and rounded to y's dtype; then these in float32, in the order of
  // each rank's first k, rounded to y's dtype. topk_weights here must then be no tensor ({}).
  // Returns the hook if asked for one, else an empty one.
  Hook combine(ConstTensorView y, ConstTensorView topk_weights, const DispatchHandle& handle,
               TensorView out, const CombineOptions& options = {});

  // --- Losing ranks and finding them again (docs/failures.md) ---
  //
  // Across hosts these calls, and masks on timeout, need more than half of the ranks that take
  // part, or half with the lowest; where they cannot be reached, kTimeout or kPeerLost, and the
  // buffer has failed.
  //
  // On GPUs these calls wait for the operations of this rank's last call; replays are the caller's
  // to wait for, before it calls one of them.
  //
  // A masked rank is neither written to nor waited for. Its experts contribute nothing: what
  // selects them is dropped like a negative index, weights are not renormalised, and a token whose
  // experts are all masked gives zeros. All ranks that are not masked go on with the same mask at
  // any time.

  // By rank: false for one that is masked, as far as this rank has noticed; true for all others,
  // also one that unmask() has let in and whose first operation is still to come.
  [[nodiscard]] std::vector<bool> active() const;

  // Masks a rank, on all ranks from their next operation at the latest, on GPUs from the caller's
  // fifth one on (until then the rank takes part); called by any active rank, between operations.
  // Nothing if it is masked already. Refused for the own rank, and on GPUs for one that has been
  // let in lately (kOrder).
  void mask(int rank);

  // Lets a masked rank take part again, on all ranks from the same operation on, at most three
  // later (GPUs: five); called by any active rank, between operations. Nothing if it is active
  // already. kOrder unless that rank waits in recover(), and on GPUs if it was masked lately or
  // is a new process whose memory not all ranks have mapped yet.
  void unmask(int rank);

  // After a failure: a new start, collective over the active ranks. Waits for all of them, masks
  // those that have ended or do not come within the timeout, and returns who is active. Handles of
  // earlier dispatches are stale, hooks that have not run are void. Called while nothing has
  // failed, it makes the operations of peers fail, since they have to come here too. A rank that is
  // masked waits here until an active one calls unmask() for it (kTimeout if none does).
  std::vector<bool> recover();

  // Ranks that wait to be let in: those that are masked and have called recover() or join().
  [[nodiscard]] std::vector<int> waiting() const;

  // The end of a process that becomes `rank` of a running buffer: in place of a process that has
  // ended and been masked, or as a rank that has never been there. `options` are those of the
  // others, with the name of their door. Blocks until an active rank calls unmask(rank); the others
  // go on meanwhile. Throws kInvalidArgument, kMismatch (options differ), kOrder (another process
  // is this rank), kTimeout (nobody opens a door, the rank is not masked, or is not let in),
  // kResource, kUnsupported.
  static Buffer join(int rank, const BufferOptions& options);

  // The same where ranks are on several hosts: `address` is the door_address of any rank that takes
  // part, `secret` that of the communicator. Memory is shared with no other rank, whichever host
  // the process is on. Throws also kInvalidArgument (another secret, no address). A rank that has
  // lost its connections comes back in this way too, once it has destroyed its buffer and
  // communicator.
  static Buffer join_across_hosts(const std::string& address, const std::string& secret, int rank,
                                  const BufferOptions& options);

  // Why a rank was lost or operations have failed, as agreed between the ranks; empty if the last
  // change of who takes part was none of the kind.
  [[nodiscard]] std::optional<Error> last_loss() const;

  // Throws the error of an operation that has failed since, if one has (GPU ranks find out here
  // without synchronising).
  void check();

  // CUDA: a cudaEvent_t recorded behind the last operation (with a hook: its send phase, then the
  // hook's), for work on other streams; recorded anew by the fourth operation after it. Null before
  // the first, and on the CPU, where an operation is over when it returns.
  [[nodiscard]] void* last_event() const;

 private:
  std::shared_ptr<runtime::BufferState> state_;  // shared with hooks, which find out if it is gone
};

}  // namespace tandem
