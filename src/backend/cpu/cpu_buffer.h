// One rank's end of a buffer on the CPU: the protocol of docs/design.md over shared memory, and,
// for peers on other hosts, over messages that do what stores into their memory would.
// cpu_buffer.cc has what both operations share (entering, waiting, publishing), dispatch.cc and
// combine.cc the two operations, remote.cc what goes to other hosts.
//
// Thread safety: one caller at a time; peers act on the same memory at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/cpu/peers.h"
#include "backend/cpu/row_ops.h"
#include "backend/cpu/workers.h"
#include "core/parcel.h"
#include "core/receive_plan.h"
#include "core/routing_plan.h"
#include "layout/block.h"
#include "layout/parcel.h"
#include "runtime/backend.h"
#include "runtime/network.h"
#include "runtime/symmetric_memory.h"

namespace tandem::cpu {

class CpuBuffer final : public runtime::BackendBuffer {
 public:
  CpuBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap, const runtime::BufferPlan& plan);
  // Of a process that joins a running buffer, on the same host as its ranks or across hosts;
  // recover() lets it in.
  CpuBuffer(const runtime::BufferPlan& plan, runtime::Descriptor board);
  CpuBuffer(const runtime::BufferPlan& plan, const runtime::Situation& situation,
            runtime::Network& network);

  void dispatch(const runtime::DispatchCall& call, runtime::Stage stage) override;
  void combine(const runtime::CombineCall& call, runtime::Stage stage) override;
  void acquire_combine_half(int half) override;
  [[nodiscard]] std::byte* own_block() override { return memory_.block(plan_.rank); }
  [[nodiscard]] runtime::HandleArrays handle_arrays(int half) override;
  void check() override {}  // errors have been thrown where they happened
  // For tests: this rank fails as they say. They outlive the buffer.
  void inject(runtime::Faults* faults) { seam().set(faults); }
  // For tests: this rank is impatient where nobody can be missed but whom they mean.
  void set_timeout(std::chrono::nanoseconds timeout) { peers_.set_timeout(timeout); }
  void mask(int rank) override;
  void unmask(int rank) override;
  void recover() override;
  [[nodiscard]] std::vector<bool> active() const override;
  [[nodiscard]] std::vector<bool> participants() const override;
  [[nodiscard]] std::optional<Error> last_loss() const override { return peers_.last_loss(); }
  [[nodiscard]] std::vector<int> waiting() const override { return peers_.waiting(); }
  [[nodiscard]] runtime::Offer offer() const override;

 private:
  // What ranks share.
  struct Shared {
    runtime::SymmetricMemory memory;
    std::unique_ptr<runtime::Membership> membership;
  };
  CpuBuffer(const runtime::BufferPlan& plan, Shared&& shared, runtime::Network* network);

  // What belongs to the dispatch that took a half, until another takes it.
  struct Half {
    Epoch dispatch_epoch = 0;
    std::optional<Epoch> combine_epoch;       // of the last combine that used the half (rule 2)
    std::vector<core::Selection> selections;  // [T * K]
    std::vector<std::int32_t> published;      // [E]: this rank's rows for each expert
    std::vector<std::int32_t> sent;           // [E]: the same, but none for owners lost since
    std::vector<std::int64_t> begin;          // [E]: row on its owner of this rank's slot 0
    std::vector<std::int64_t> landed;         // [L, R]: row in a remote source's landing memory
    std::vector<core::ParcelPlaces> parcels;  // [R]: what came from ranks on other hosts
    std::vector<float> weights;               // [T * K]: partial sums
    std::vector<std::int64_t> parts;          // [T * K]: row of a remote owner's part when it lands
    std::vector<std::int32_t> counts;         // the handle's arrays
    std::vector<std::int64_t> offsets;
    std::vector<std::int64_t> ranges;
    std::vector<std::int32_t> source_tokens;
  };

  using Arguments = std::uint32_t[layout::kNumArguments];

  // Where the rows and source tokens of a dispatch begin in a peer's block.
  struct Region {
    std::int64_t rows;
    std::int64_t sources;
  };

  // --- cpu_buffer_setup.cc ---
  void set_words(Epoch epoch);
  // Maps the block of the process that is this rank now. False: it cannot be had.
  [[nodiscard]] bool meet(int rank);

  // --- cpu_buffer.cc ---
  [[nodiscard]] std::byte* block(int rank) const { return memory_.block(rank); }
  [[nodiscard]] bool is_remote(int rank) const {
    return remote_ != nullptr && block(rank) == nullptr;
  }
  [[nodiscard]] std::atomic_ref<Word> word(int rank, std::int64_t offset) const {
    return std::atomic_ref<Word>(*reinterpret_cast<Word*>(block(rank) + offset));
  }
  [[nodiscard]] runtime::Seam& seam() { return peers_.seam(); }
  void ring_all();

  // Rule 1: waits until every peer has completed epoch - 2.
  void enter(const Context& context);
  // Publishes header and arguments to every peer; `counts` (dispatch) go before them.
  void publish_header(const Context& context, int half, const Arguments& arguments,
                      std::span<const std::int32_t> counts);
  // Waits for the headers of `peers` and checks that they agree with this rank's.
  void await_headers(const Context& context, Phase phase, std::span<const int> peers,
                     const Arguments& arguments);
  [[nodiscard]] Outcome await_arrived(const Context& context, std::uint32_t plan);
  void await_completed(const Context& context, Phase phase, Epoch wanted);
  // `plan` is the generation of the plan that the rows were written by; kAnyPlan where none is
  // needed: in landing regions, and between hosts, since there the receiver puts rows where they
  // go.
  static constexpr std::uint32_t kAnyPlan = 0;
  void publish_arrived(const Context& context, std::uint32_t plan);
  void publish_completed(Epoch epoch);
  [[nodiscard]] bool has_arrived(const Context& context, int peer, std::uint32_t plan) const;
  // Runs one stage of an operation; tells peers of a failure that leaves them waiting.
  template <typename Action>
  void run(Epoch epoch, Action&& action) {
    last_epoch_ = epoch;
    try {
      action();
      if (remote_) remote_->leave();
    } catch (const Error& error) {
      if (!runtime::leaves_buffer_sound(error.code())) peers_.fail(error);
      throw;
    }
  }
  [[nodiscard]] Context next() const { return {Operation::kNone, next_epoch_}; }
  // Drops selections of experts whose ranks take no part: in a dispatch at hand, and in those whose
  // combine is still to come when ranks are lost.
  void forget_absent(const Context& context, Half& half);
  void forget(std::span<const int> lost);
  // Tells ranks of this host that are to come how far this one is; they are done with all before.
  void welcome(std::span<const int> coming);
  [[nodiscard]] std::vector<Word> counts_of(int source, int parity) const;
  void require_same(const Context& context, Phase phase, int peer, const Arguments& arguments);

  // --- dispatch.cc ---
  void send_dispatch(const runtime::DispatchCall& call, const Context& context);
  void receive_dispatch(const runtime::DispatchCall& call, const Context& context);
  [[nodiscard]] core::ReceiveShape shape_of(const runtime::DispatchCall& call) const;
  void read_counts(const runtime::DispatchCall& call, const Context& context, const Plan& plan);
  void plan_received(const runtime::DispatchCall& call, const Context& context, const Plan& plan);
  [[nodiscard]] Outcome write_rows(const runtime::DispatchCall& call, const Context& context,
                                   std::span<const std::int64_t> begin);
  void write_sources(const runtime::DispatchCall& call, const Context& context,
                     std::span<const std::int64_t> begin);
  [[nodiscard]] Region region_of(const runtime::DispatchCall& call, const Context& context,
                                 int peer) const;
  // own_starts_: where an expert's rows begin if this rank's own rows, as published, lie one after
  // the other. So they do in the landing memory, whoever is lost later.
  void start_own_rows(const Half& half);
  void copy_landed_rows(const runtime::DispatchCall& call, const Context& context);
  void clear_lost_rows(const runtime::DispatchCall& call, const Context& context, const Plan& plan);
  [[nodiscard]] StoreKind store_kind(std::int64_t num_bytes) const;

  // --- combine.cc ---
  void send_combine(const runtime::CombineCall& call, const Context& context);
  void receive_combine(const runtime::CombineCall& call, const Context& context);
  void stage_rows(const runtime::CombineCall& call);
  void locate_outputs(const runtime::CombineCall& call, const Context& context);
  void add_rows(const runtime::CombineCall& call);
  [[nodiscard]] std::span<const int> owners_of(const Half& half);
  void fill_arguments(const runtime::CombineCall& call, Arguments& arguments) const;

  // --- partial_sums.cc ---
  // Adds up what this rank's experts made of each row of a parcel, and sends the sums to its
  // source.
  void push_parts(const runtime::CombineCall& call, const Context& context);
  // Adds up parts that have come, and those of owners on this host.
  void add_parts(const runtime::CombineCall& call, const Context& context);
  // Where the parts that go to other hosts are staged, and how many bytes they may take.
  [[nodiscard]] std::int64_t staged_part_bytes() const;

  // --- remote.cc ---
  [[nodiscard]] std::unique_ptr<runtime::RemotePeers> open_remote(runtime::Network* network);
  void publish_remote_header(const Context& context, Word header, const Arguments& arguments,
                             std::span<const std::int32_t> counts);
  // Sends one word to every peer on another host, after all that was sent before.
  void publish_remote(std::int64_t offset, Word word);
  // The same, but with the next operation's header if that follows soon: peers wait for it two
  // operations later.
  void publish_remote_completed(std::int64_t offset, Word word);
  // Has what this rank sent in epochs like this one left its memory?
  [[nodiscard]] bool has_left(int peer, Epoch epoch) const;
  // Where the staged rows begin in the staging memory, by token, behind the lists for all peers;
  // and the parcel of a source in the landing memory, behind the outputs of a combine.
  [[nodiscard]] std::int64_t staged_rows() const;
  [[nodiscard]] std::int64_t landed_parcel(int source) const;
  [[nodiscard]] std::int32_t* staged_list(int parity, int peer) const {
    return reinterpret_cast<std::int32_t*>(remote_->staging(parity) + peer * parcel_.rows());
  }
  // Sends a dispatch's rows, and that they have arrived.
  void send_parcels(const runtime::DispatchCall& call, const Context& context);
  void stage_parcels(const runtime::DispatchCall& call, const Context& context);
  void write_lists(const runtime::DispatchCall& call, const Context& context);
  // Puts the rows of the parcels that have arrived in their places.
  void place_parcels(const runtime::DispatchCall& call, const Context& context);
  void place_parcel(const runtime::DispatchCall& call, const Context& context, int source);
  // Where each source on another host wants the expert outputs of this rank.
  void plan_landed(Half& half);
  // Sends expert outputs from the combine region to the sources on other hosts.
  void push_rows(const runtime::CombineCall& call, const Context& context);

  runtime::BufferPlan plan_;
  runtime::SymmetricMemory memory_;
  Workers workers_;
  std::array<Half, layout::kNumHalves> halves_;
  layout::Parcel parcel_;
  std::unique_ptr<runtime::RemotePeers> remote_;  // null where all ranks share memory
  Peers peers_;
  Plan received_plan_;                       // scratch of receive_dispatch
  std::vector<core::Selection> selections_;  // scratch, swapped into the half
  std::vector<std::int32_t> sent_;           // the same
  std::vector<std::byte*> expert_rows_;      // [E] scratch: where this rank's slot 0 lies
  std::vector<std::int64_t> own_starts_;     // [E] scratch: see start_own_rows
  std::vector<std::int32_t> sources_;        // [T * K] scratch of write_sources
  std::vector<bool> staged_;                 // [T] of the dispatch at hand: goes to another host
  std::vector<std::int32_t> last_staged_;    // [R] scratch: the last token for a peer
  std::vector<std::byte> own_parts_;         // scratch of add_parts: K rows a thread
  std::vector<int> owners_;                  // scratch: ranks that this rank's tokens went to
  std::vector<std::int32_t> count_matrix_;   // [R, E] of the dispatch at hand
  std::vector<std::int64_t> landing_begin_;  // [E]: slotted: landing row of a source's slot 0
  std::deque<Epoch> held_;                   // epochs sent and not yet received, oldest first
  Epoch next_epoch_;
  Epoch last_epoch_ = 0;            // of the operation whose phase has run last
  std::optional<Epoch> completed_;  // as it was told last
};

// How a dispatch's or a combine's arguments travel beside the header.
void fill_arguments(const runtime::DispatchCall& call,
                    std::uint32_t (&arguments)[layout::kNumArguments]);

}  // namespace tandem::cpu
