// Control words that a broken or hostile peer fills: one rank dispatches and combines while the
// fuzzer plays its peers. They do what the protocol asks but for a few words, of the rank's block
// or of the membership board, which get any epoch and value before the operation, when the rank's
// header is seen, or between send and receive phase. An operation returns or throws tandem::Error
// within its timeout; it writes nowhere but where the protocol lets it, whatever the words say, and
// what it returns lies within its tensors.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "fuzz/check.h"
#include "layout/block.h"
#include "runtime/buffer_state.h"
#include "runtime/waiter.h"
#include "support/guarded_block.h"
#include "tandem/buffer.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;
using layout::Epoch;
using layout::Word;
using test::GuardedBlock;

constexpr int kMostOperations = 5;
constexpr std::chrono::milliseconds kTimeout{20};

// The thread in which the peers answer; one for all runs, since to start one takes longer than most
// operations. Tasks come one at a time.
class PeerThread {
 public:
  PeerThread() {
    std::thread([this] {
      for (std::uint32_t seen = 0;;) {
        started_.wait(seen);
        seen = started_;
        task_();
        done_ = seen;
        done_.notify_one();
      }
    }).detach();
  }

  void start(std::function<void()> task) {
    task_ = std::move(task);
    ++started_;
    started_.notify_one();
  }
  void join() { done_.wait(started_ - 1); }

 private:
  std::function<void()> task_;
  std::atomic<std::uint32_t> started_ = 0;
  std::atomic<std::uint32_t> done_ = 0;
};

// Words that are not what the protocol asks for.
struct Tampering {
  enum class When { kBefore, kAtHeader, kBetweenPhases };
  When when = When::kBefore;
  int operation = 0;  // number of the operation in this run
  std::int64_t offset = 0;
  int num_words = 1;
  Word word = 0;
  bool on_board = false;
};

class Run {
 public:
  explicit Run(FuzzedDataProvider& data)
      : data_(&data),
        num_ranks_(data.ConsumeIntegralInRange(2, 3)),
        rank_(data.ConsumeIntegralInRange(0, num_ranks_ - 1)),
        num_operations_(data.ConsumeIntegralInRange(1, kMostOperations)),
        options_(choose_options()),
        plan_(runtime::make_plan(options_, rank_, num_ranks_)),
        epoch_(options_.first_epoch),
        peers_(rank_, num_ranks_, options_.first_epoch) {
    for (int rank = 0; rank < num_ranks_; ++rank) blocks_.emplace_back(plan_.block.size_bytes());
    // Peers have completed what was before the first operation.
    for (std::int64_t offset = 0; offset < plan_.block.doorbell(); offset += sizeof(Word)) {
      for (const GuardedBlock& block : blocks_) {
        store(block, offset, layout::make_word(epoch_ - 1, 0));
      }
    }
    buffer_.emplace(
        Communicator(std::make_shared<test::PlacedBootstrap>(rank_, blocks_, peers_.board)),
        options_);
    const int num_tamperings = data.ConsumeIntegralInRange(0, 6);
    for (int i = 0; i < num_tamperings; ++i) tamperings_.push_back(choose_tampering());
  }

  void go() {
    bool sound = true;
    for (operation_ = 0; operation_ < num_operations_ && sound; ++operation_) {
      sound = received_ && data_->ConsumeIntegralInRange(0, 2) > 0 ? combine() : dispatch();
    }
  }

 private:
  BufferOptions choose_options() {
    FuzzedDataProvider& data = *data_;
    return {.num_experts = data.ConsumeIntegralInRange(1, 6),
            .max_tokens = data.ConsumeIntegralInRange(1, 5),
            .max_hidden = data.ConsumeIntegralInRange(1, 140),
            .max_topk = data.ConsumeIntegralInRange(1, 3),
            .widest_format = data.ConsumeBool() ? Format::kFloat32 : Format::kBFloat16,
            .padded_layout = data.ConsumeBool(),
            .capacity_rows = data.ConsumeBool() ? data.ConsumeIntegralInRange(1, 12) : 0,
            .timeout = kTimeout,
            .on_timeout = data.ConsumeBool() ? OnTimeout::kFail : OnTimeout::kMask,
            .first_epoch = data.ConsumeBool() ? 1U : 0xfffffffeU};
  }

  Tampering choose_tampering() {
    FuzzedDataProvider& data = *data_;
    const layout::Block& block = plan_.block;
    Tampering tampering;
    tampering.when = static_cast<Tampering::When>(data.ConsumeIntegralInRange(0, 2));
    tampering.operation = data.ConsumeIntegralInRange(0, num_operations_ - 1);
    const Epoch epoch = epoch_ + static_cast<Epoch>(tampering.operation);
    const int source = data.ConsumeIntegralInRange(0, num_ranks_ - 1);
    const int parity =
        data.ConsumeIntegralInRange(0, 7) > 0 ? layout::parity(epoch) : data.ConsumeBool();
    std::uint32_t likely = 0;
    switch (data.ConsumeIntegralInRange(0, 9)) {
      case 8:
      case 9: {  // the decision, a status word, or words of a proposal
        const layout::Board board(num_ranks_);
        const std::int64_t proposal = board.view(source, data.ConsumeIntegralInRange(0U, 3U));
        const std::int64_t offsets[] = {
            board.decision(),
            board.status(source, static_cast<layout::Status>(
                                     data.ConsumeIntegralInRange(0, layout::kNumStatusWords - 1))),
            proposal + 8 * data.ConsumeIntegralInRange(0, 8)};
        tampering.on_board = true;
        tampering.offset = data.PickValueInArray(offsets);
        tampering.num_words = data.ConsumeIntegralInRange(1, 3);
        likely = data.ConsumeIntegralInRange(0U, 3U);
        const Word generation = data.ConsumeIntegralInRange(0U, 5U);
        if (data.ConsumeBool()) {
          tampering.word = generation << 32 | likely;
          return tampering;
        }
        break;
      }
      case 0:
        tampering.offset = block.header(parity, source);
        likely = layout::encode(layout::Header{Operation::kCombine, 1, 77});
        break;
      case 1:
        tampering.offset = block.argument(parity, source,
                                          static_cast<layout::Argument>(data.ConsumeIntegralInRange(
                                              0, layout::kNumArguments - 1)));
        break;
      case 2:
        tampering.offset = block.arrived(parity, source, 0);
        break;
      case 3:
        tampering.offset = block.completed(source);
        break;
      case 4:  // the doorbell: its two words
        tampering.offset = block.doorbell();
        break;
      default: {  // counts of one expert, or of it and all behind it
        const int expert = data.ConsumeIntegralInRange(0, options_.num_experts - 1);
        tampering.offset = block.count(parity, source, expert);
        tampering.num_words = data.ConsumeBool() ? 1 : options_.num_experts - expert;
        likely = data.ConsumeIntegralInRange<std::uint32_t>(
            0, options_.max_tokens * options_.max_topk + 1);
      }
    }
    const Epoch its_epoch =
        data.ConsumeIntegralInRange(0, 3) > 0 ? epoch : fuzz::awkward<Epoch>(data, epoch);
    tampering.word = layout::make_word(its_epoch, fuzz::awkward<std::uint32_t>(data, likely));
    return tampering;
  }

  static void store(const GuardedBlock& block, std::int64_t offset, Word word) {
    std::atomic_ref<Word>(*reinterpret_cast<Word*>(block.at(offset)))
        .store(word, std::memory_order_release);
  }
  static Word load(const GuardedBlock& block, std::int64_t offset) {
    return std::atomic_ref<Word>(*reinterpret_cast<Word*>(block.at(offset)))
        .load(std::memory_order_acquire);
  }

  void tamper(Tampering::When when) {
    for (const Tampering& tampering : tamperings_) {
      if (tampering.when == when && tampering.operation == operation_) {
        for (int i = 0; i < tampering.num_words; ++i) {
          store(tampering.on_board ? peers_.board : blocks_[rank_],
                tampering.offset + i * static_cast<int>(sizeof(Word)), tampering.word);
        }
      }
    }
  }

  // The peers' part of an operation whose header this rank has sent: the same arguments, counts of
  // their own, rows that are what they are, and the end.
  void answer(int peer, const std::vector<std::int32_t>& counts) {
    const layout::Block& block = plan_.block;
    const GuardedBlock& mine = blocks_[rank_];
    const GuardedBlock& theirs = blocks_[peer];
    const int parity = layout::parity(epoch_);
    for (int which = 0; which < layout::kNumArguments; ++which) {
      const auto argument = static_cast<layout::Argument>(which);
      store(mine, block.argument(parity, peer, argument),
            load(theirs, block.argument(parity, rank_, argument)));
    }
    for (int expert = 0; expert < options_.num_experts; ++expert) {
      store(mine, block.count(parity, peer, expert),
            layout::make_word(epoch_, static_cast<std::uint32_t>(counts[expert])));
    }
    tamper(Tampering::When::kAtHeader);
    store(mine, block.header(parity, peer), load(theirs, block.header(parity, rank_)));
    say_arrived(peer);
    store(mine, block.completed(peer), layout::make_word(epoch_, 0));
    ring();
  }

  // A peer takes note of a new view, and writes its rows by it.
  void follow(int peer) {
    runtime::Membership& member = *peers_.members[peer];
    if (!member.changed()) return;
    try {
      member.adopt(member.newest());
    } catch (const Error&) {
      return;  // the board is damaged
    }
    say_arrived(peer);
    ring();
  }

  // Rows of a packed dispatch lie as the peer's view wants them to.
  void say_arrived(int peer) {
    store(blocks_[rank_], plan_.block.arrived(layout::parity(epoch_), peer, 0),
          layout::make_word(epoch_, packed_ ? peers_.members[peer]->view().generation : 0));
  }

  void ring() {
    runtime::fence(std::memory_order_seq_cst);
    runtime::ring(*reinterpret_cast<layout::Doorbell*>(blocks_[rank_].at(plan_.block.doorbell())));
  }

  // Runs an operation beside its peers; false if the buffer is good for nothing more.
  template <typename Operate>
  bool operate(Operate operate) {
    std::vector<std::vector<std::int32_t>> counts(num_ranks_);
    for (auto& row : counts) {
      // Often few, so that they fit; sometimes as many as are possible at all.
      row.assign(options_.num_experts, 0);
      const bool many = data_->ConsumeIntegralInRange(0, 3) == 0;
      for (std::int32_t& count : row) {
        const int most = options_.max_tokens * (many ? options_.max_topk : 1);
        if (many || data_->ConsumeBool()) count = data_->ConsumeIntegralInRange(0, most);
      }
    }
    tamper(Tampering::When::kBefore);
    for (GuardedBlock& block : blocks_) block.remember();
    std::atomic<bool> over = false;
    static PeerThread& peers = *new PeerThread;  // never ends: threads end with the process
    peers.start([&] {
      const std::int64_t header = plan_.block.header(layout::parity(epoch_), rank_);
      const auto has_header = [&](const GuardedBlock& block) {
        return layout::epoch_of(load(block, header)) == epoch_;
      };
      while (!std::all_of(blocks_.begin(), blocks_.end(), has_header)) {
        if (over) return;
        std::this_thread::yield();
      }
      for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer != rank_) answer(peer, counts[peer]);
      }
      while (!over) {
        for (int peer = 0; peer < num_ranks_; ++peer) {
          if (peer != rank_) follow(peer);
        }
        std::this_thread::yield();
      }
    });
    bool sound = true;
    try {
      operate();
    } catch (const Error& error) {
      check(error.peer() < num_ranks_, "an error names a rank or none");
      sound = error.code() == ErrorCode::kCapacity;
    }
    over = true;
    peers.join();
    allow_control_words();
    for (const GuardedBlock& block : blocks_) {
      check(!block.first_change(), "an operation writes where the protocol lets it");
    }
    ++epoch_;
    return sound;
  }

  void allow_control_words() {
    const layout::Block& block = plan_.block;
    blocks_[rank_].allow(0, block.control_bytes());  // peers wrote there too
    for (GuardedBlock& peer : blocks_) {
      const auto allow = [&](std::int64_t offset, std::int64_t num_words) {
        peer.allow(offset, offset + num_words * static_cast<std::int64_t>(sizeof(Word)));
      };
      for (int parity = 0; parity < 2; ++parity) {
        allow(block.header(parity, rank_), 1);
        allow(block.argument(parity, rank_, layout::Argument::kMaxTokens), layout::kNumArguments);
        allow(block.arrived(parity, rank_, 0), 1);
        allow(block.count(parity, rank_, 0), options_.num_experts);
      }
      allow(block.completed(rank_), 1);
      allow(block.doorbell(), 1);
    }
  }

  // Where a dispatch may write: the view of either half, or this rank's stretch of a landing
  // region.
  void allow_rows(const DispatchOptions& call, int hidden, int topk) {
    const layout::Block& block = plan_.block;
    const layout::Capacity& capacity = block.capacity();
    const std::int64_t pitch = layout::RowShape{hidden, call.format}.pitch();
    for (int rank = 0; rank < num_ranks_; ++rank) {
      GuardedBlock& peer = blocks_[rank];
      if (call.placement == Placement::kPacked) {
        for (int half = 0; half < layout::kNumHalves; ++half) {
          peer.allow(block.view_sources(half), block.view_sources(half) + 4 * capacity.view_rows);
          peer.allow(block.view_rows(half), block.view_rows(half) + pitch * capacity.view_rows);
        }
        continue;
      }
      const int parity = layout::parity(epoch_);
      const std::int64_t limit = core::rows_per_source(
          call.max_tokens, topk, static_cast<std::int32_t>(plan_.experts.num_local(rank)));
      const std::int64_t first = limit * rank_;
      const std::int64_t sources = block.landing_sources(parity);
      peer.allow(sources + 4 * first, sources + 4 * (first + limit));
      const std::int64_t rows = block.landing_rows(parity);
      peer.allow(rows + pitch * first, rows + pitch * (first + limit));
    }
  }

  bool dispatch() {
    FuzzedDataProvider& data = *data_;
    constexpr Format kFormats[] = {Format::kBFloat16, Format::kFloat16, Format::kFloat32,
                                   Format::kFp8,      Format::kFp8Pow2, Format::kFp8Ue8m0};
    DispatchOptions call{.format = data.PickValueInArray(kFormats)};
    if (options_.widest_format == Format::kBFloat16 && call.format == Format::kFloat32) {
      call.format = Format::kFp8;
    }
    const bool hooked = data.ConsumeBool();
    call.placement = hooked || data.ConsumeBool() ? Placement::kSlotted : Placement::kPacked;
    call.layout = options_.padded_layout && data.ConsumeBool() ? Layout::kPadded : Layout::kPacked;
    call.row_alignment = data.ConsumeBool() ? 1 : 3;
    call.max_tokens = data.ConsumeIntegralInRange(1, options_.max_tokens);
    call.return_hook = hooked;
    num_tokens_ = data.ConsumeIntegralInRange(0, call.max_tokens);
    topk_ = data.ConsumeIntegralInRange(1, options_.max_topk);
    hidden_ = data.ConsumeIntegralInRange(1, options_.max_hidden);
    const DType dtype = is_fp8(call.format) ? DType::kBFloat16 : value_dtype(call.format);
    x_.assign(static_cast<std::size_t>(num_tokens_) * hidden_ * size_of(dtype), std::byte{0x3c});
    topk_idx_.clear();
    for (int i = 0; i < num_tokens_ * topk_; ++i) {
      topk_idx_.push_back(data.ConsumeIntegralInRange(-1, options_.num_experts - 1));
    }
    const std::int64_t num_local = plan_.experts.num_local(rank_);
    const bool padded = call.layout == Layout::kPadded;
    const std::int64_t rows_each =
        padded ? std::int64_t{num_ranks_} * call.max_tokens : plan_.block.capacity().rows;
    if (call.placement == Placement::kSlotted) {
      call.recv_x =
          output(recv_x_, value_dtype(call.format), padded, num_local, rows_each, hidden_);
      const int num_scales = layout::RowShape{hidden_, call.format}.num_scales();
      if (num_scales > 0) {
        const DType scale = call.format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32;
        call.recv_scales = output(recv_scales_, scale, padded, num_local, rows_each, num_scales);
      }
    }
    packed_ = call.placement == Placement::kPacked;
    const bool sound = operate([&] {
      allow_rows(call, hidden_, topk_);
      received_.reset();
      DispatchResult result = buffer_->dispatch(
          {x_.data(), dtype, {num_tokens_, hidden_}},
          view_of(static_cast<const std::int32_t*>(topk_idx_.data()), {num_tokens_, topk_}), call);
      if (result.hook) {
        tamper(Tampering::When::kBetweenPhases);
        result.hook();
      }
      check_result(result, num_local, padded ? num_local * rows_each : rows_each);
      received_ = result;
    });
    return sound;
  }

  static TensorView output(std::vector<std::byte>& memory, DType dtype, bool padded,
                           std::int64_t num_local, std::int64_t rows_each, std::int64_t width) {
    memory.assign((padded ? num_local : 1) * rows_each * width * size_of(dtype), std::byte{0});
    if (padded) return {memory.data(), dtype, {num_local, rows_each, width}};
    return {memory.data(), dtype, {rows_each, width}};
  }

  static void check_result(const DispatchResult& result, std::int64_t num_local,
                           std::int64_t rows) {
    for (std::int64_t local = 0; local < num_local; ++local) {
      const std::int64_t begin = result.offsets.as<std::int64_t>()[local];
      const std::int64_t count = result.counts.as<std::int32_t>()[local];
      check(begin >= 0 && count >= 0 && begin + count <= rows, "received rows lie in the tensor");
    }
  }

  bool combine() {
    FuzzedDataProvider& data = *data_;
    const DType dtype = options_.widest_format == Format::kFloat32 && data.ConsumeBool()
                            ? DType::kFloat32
                            : DType::kBFloat16;
    const bool zero_copy = data.ConsumeBool();
    const bool hooked = data.ConsumeBool();
    const DispatchResult received = *received_;
    const bool padded = received.x.num_dims == 3;
    const std::int64_t rows_each = received.x.shape[padded ? 1 : 0];
    std::vector<std::byte> y_memory;
    TensorView y = output(y_memory, dtype, padded, received.x.shape[0], rows_each, hidden_);
    const std::vector<float> weights(static_cast<std::size_t>(num_tokens_) * topk_, 0.5F);
    std::vector<std::byte> out(static_cast<std::size_t>(num_tokens_) * hidden_ * size_of(dtype));
    return operate([&] {
      for (int half = 0; half < layout::kNumHalves; ++half) {
        const std::int64_t first = plan_.block.combine_rows(half);
        const layout::Capacity& capacity = plan_.block.capacity();
        blocks_[rank_].allow(first, first + capacity.combine_rows * capacity.combine_pitch);
      }
      if (zero_copy) y = buffer_->next_combine_buffer(received.handle, dtype);
      const Hook hook =
          buffer_->combine(y, view_of(weights.data(), {num_tokens_, topk_}), received.handle,
                           {out.data(), dtype, {num_tokens_, hidden_}}, {.return_hook = hooked});
      if (hook) {
        tamper(Tampering::When::kBetweenPhases);
        hook();
      }
    });
  }

  FuzzedDataProvider* data_;
  int num_ranks_;
  int rank_;
  int num_operations_;
  BufferOptions options_;
  runtime::BufferPlan plan_;
  Epoch epoch_;  // of the operation at hand
  std::vector<GuardedBlock> blocks_;
  std::optional<Buffer> buffer_;
  std::vector<Tampering> tamperings_;
  int operation_ = 0;
  test::PeersOnBoard peers_;
  bool packed_ = false;  // the placement of the dispatch at hand

  // The last dispatch: its tensors, and what it returned if it succeeded.
  int num_tokens_ = 0;
  int topk_ = 1;
  int hidden_ = 1;
  std::vector<std::byte> x_;
  std::vector<std::int32_t> topk_idx_;
  std::vector<std::byte> recv_x_;
  std::vector<std::byte> recv_scales_;
  std::optional<DispatchResult> received_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  Run(data).go();
  return 0;
}
