#include "backend/cpu/cpu_buffer.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "tandem/error.h"

namespace tandem::cpu {

runtime::HandleArrays CpuBuffer::handle_arrays(int half) {
  Half& arrays = halves_[half];
  return {arrays.counts.data(), arrays.offsets.data(), arrays.ranges.data(),
          arrays.source_tokens.data()};
}

// Pairs with the fence in Waiter::prepare_to_sleep.
void CpuBuffer::ring_all() {
  runtime::fence(std::memory_order_seq_cst);
  // Also those that are masked: they may wait to be let in.
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    if (block(rank) == nullptr) continue;  // on another host, or it has never been there
    runtime::ring(*reinterpret_cast<layout::Doorbell*>(block(rank) + plan_.block.doorbell()));
  }
}

void CpuBuffer::await_completed(const Context& context, Phase phase, Epoch wanted) {
  const auto seen = [&](int peer) {  // pairs with the release in publish_completed
    return layout::epoch_of(
        word(plan_.rank, plan_.block.completed(peer)).load(std::memory_order_acquire));
  };
  peers_.await(
      context, phase, wanted, peers_.everyone(),
      [&](int peer) {
        const bool has_completed =
            layout::has_reached(seen(peer), wanted) || peers_.begins_after(peer, wanted);
        return has_completed && has_left(peer, wanted);
      },
      seen);
}

void CpuBuffer::enter(const Context& context) {
  peers_.begin(context);
  // A peer that was let in for this epoch was so before its proposer completed the last but one.
  // It is waited for too: across hosts it may not have heard of this rank yet.
  do {
    await_completed(context, Phase::kEnter, context.epoch - 2);
  } while (peers_.begin(context));
  seam().pass(Point::kEntered);
}

void CpuBuffer::publish_header(const Context& context, int half, const Arguments& arguments,
                               std::span<const std::int32_t> counts) {
  const int parity = layout::parity(context.epoch);
  const layout::Header header{context.operation, half, layout::hash_arguments(arguments)};
  const Word header_word = layout::make_word(context.epoch, layout::encode(header));
  for (const int peer : peers_.active()) {
    if (is_remote(peer)) continue;
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
      seam().store(Point::kCount, peer,
                   word(peer, plan_.block.count(parity, plan_.rank, static_cast<int>(expert))),
                   layout::make_word(context.epoch, static_cast<std::uint32_t>(counts[expert])),
                   std::memory_order_relaxed);
    }
    for (int which = 0; which < layout::kNumArguments; ++which) {
      seam().store(Point::kArgument, peer,
                   word(peer, plan_.block.argument(parity, plan_.rank,
                                                   static_cast<layout::Argument>(which))),
                   layout::make_word(context.epoch, arguments[which]), std::memory_order_relaxed);
    }
    // Releases counts and arguments, and for a combine the rows staged or written by the caller.
    // Pairs with the acquire in await_headers.
    seam().store(Point::kHeader, peer, word(peer, plan_.block.header(parity, plan_.rank)),
                 header_word, std::memory_order_release);
  }
  seam().pass(Point::kHeadersSent);
  ring_all();
  if (remote_) publish_remote_header(context, header_word, arguments, counts);
}

void CpuBuffer::await_headers(const Context& context, Phase phase, std::span<const int> peers,
                              const Arguments& arguments) {
  const int parity = layout::parity(context.epoch);
  const auto seen = [&](int peer) {  // pairs with the release in publish_header
    return layout::epoch_of(
        word(plan_.rank, plan_.block.header(parity, peer)).load(std::memory_order_acquire));
  };
  peers_.await(
      context, phase, context.epoch, peers, [&](int peer) { return seen(peer) == context.epoch; },
      seen);
  for (const int peer : peers) {
    if (peers_.takes_part(peer, context.epoch)) require_same(context, phase, peer, arguments);
  }
  seam().pass(Point::kHeadersCame);
}

void CpuBuffer::require_same(const Context& context, Phase phase, int peer,
                             const Arguments& arguments) {
  const int parity = layout::parity(context.epoch);
  const layout::Header header = layout::decode_header(layout::value_of(
      word(plan_.rank, plan_.block.header(parity, peer)).load(std::memory_order_relaxed)));
  ErrorInfo info{.code = ErrorCode::kMismatch,
                 .operation = context.operation,
                 .epoch = context.epoch,
                 .phase = phase,
                 .peer = peer};
  const std::string other = "rank " + std::to_string(peer);
  const std::string self = "rank " + std::to_string(plan_.rank);
  if (header.operation != context.operation) {
    throw Error(info, other + " calls " + std::string(name(header.operation)) + " where " + self +
                          " calls " + std::string(name(context.operation)));
  }
  // The words themselves, not only their hash: 28 bits cannot tell all arguments apart.
  Arguments theirs;
  for (int which = 0; which < layout::kNumArguments; ++which) {
    theirs[which] = layout::value_of(
        word(plan_.rank, plan_.block.argument(parity, peer, static_cast<layout::Argument>(which)))
            .load(std::memory_order_relaxed));
  }
  if (std::equal(std::begin(theirs), std::end(theirs), std::begin(arguments))) return;
  const bool is_dispatch = context.operation == Operation::kDispatch;
  const auto shape = static_cast<int>(layout::Argument::kShape);
  const layout::ShapeArgument their_shape = layout::decode_shape(theirs[shape]);
  const layout::ShapeArgument our_shape = layout::decode_shape(arguments[shape]);
  const auto differ = [&](const std::string& what, const std::string& their_value,
                          const std::string& our_value) {
    throw Error(
        info, other + " has " + what + ' ' + their_value + " where " + self + " has " + our_value);
  };
  const auto compare = [&](const char* what, std::int64_t their_value, std::int64_t our_value) {
    if (their_value == our_value) return;
    info.expected = our_value;
    info.seen = their_value;
    differ(what, std::to_string(their_value), std::to_string(our_value));
  };
  const auto element = [&](std::uint32_t value) {
    return std::string(is_dispatch ? name(static_cast<Format>(value))
                                   : name(static_cast<DType>(value)));
  };
  compare("hidden size", their_shape.hidden, our_shape.hidden);
  compare("top-k", their_shape.topk, our_shape.topk);
  if (their_shape.element != our_shape.element) {
    differ(is_dispatch ? "format" : "dtype", element(their_shape.element),
           element(our_shape.element));
  }
  if (their_shape.placement != our_shape.placement) {
    differ("placement", std::string(name(their_shape.placement)),
           std::string(name(our_shape.placement)));
  }
  if (their_shape.layout != our_shape.layout) {
    differ("layout", std::string(name(their_shape.layout)), std::string(name(our_shape.layout)));
  }
  if (their_shape.partial_sums != our_shape.partial_sums) {
    const auto given = [](bool is) { return std::string(is ? "given to" : "not given to"); };
    differ("topk_weights", given(their_shape.partial_sums) + " its dispatch",
           given(our_shape.partial_sums) + " its");
  }
  const auto tokens = static_cast<int>(layout::Argument::kMaxTokens);
  compare(is_dispatch ? "max_tokens" : "a handle of the dispatch of epoch", theirs[tokens],
          arguments[tokens]);
  const auto alignment = static_cast<int>(layout::Argument::kAlignment);
  compare("row_alignment", theirs[alignment], arguments[alignment]);
  throw Error(info, other + " has other arguments than " + self);
}

void CpuBuffer::publish_arrived(const Context& context, std::uint32_t plan) {
  const std::int64_t offset = plan_.block.arrived(layout::parity(context.epoch), plan_.rank, 0);
  const Word arrived = layout::make_word(context.epoch, plan);
  for (const int peer : peers_.active()) {
    // Releases the rows. Pairs with the acquire in has_arrived.
    if (is_remote(peer)) continue;
    seam().store(Point::kArrived, peer, word(peer, offset), arrived, std::memory_order_release);
  }
  ring_all();
}

// Have the rows of `peer` arrived, written by this plan? Pairs with the release in publish_arrived.
bool CpuBuffer::has_arrived(const Context& context, int peer, std::uint32_t plan) const {
  if (is_remote(peer)) plan = kAnyPlan;
  return word(plan_.rank, plan_.block.arrived(layout::parity(context.epoch), peer, 0))
             .load(std::memory_order_acquire) == layout::make_word(context.epoch, plan);
}

Outcome CpuBuffer::await_arrived(const Context& context, std::uint32_t plan) {
  return peers_.await_or_change(
      context, Phase::kRows, context.epoch, peers_.everyone(),
      [&](int peer) { return has_arrived(context, peer, plan); },
      [&](int peer) {
        return layout::epoch_of(
            word(plan_.rank, plan_.block.arrived(layout::parity(context.epoch), peer, 0))
                .load(std::memory_order_relaxed));
      });
}

void CpuBuffer::publish_completed(Epoch epoch) {
  completed_ = epoch;
  const std::int64_t offset = plan_.block.completed(plan_.rank);
  const Word completed = layout::make_word(epoch, 0);
  for (const int peer : peers_.active()) {
    // Orders this rank's reads of the epoch before it: whoever sees the word may overwrite what was
    // read. Pairs with the acquire in await_completed.
    if (is_remote(peer)) continue;
    seam().store(Point::kCompleted, peer, word(peer, offset), completed, std::memory_order_release);
  }
  ring_all();
  if (remote_) publish_remote_completed(offset, completed);
}

void CpuBuffer::acquire_combine_half(int half) {
  const std::optional<Epoch> last = halves_[half].combine_epoch;
  if (!last) return;
  run(next_epoch_, [&] {
    await_completed({Operation::kCombine, next_epoch_}, Phase::kCombineHalf, *last);
  });
}

void CpuBuffer::forget_absent(const Context& context, Half& half) {
  const std::span<const int> present = peers_.participants(context);
  if (static_cast<int>(present.size()) == plan_.num_ranks) return;
  for (core::Selection& selection : half.selections) {
    if (selection.expert >= 0 &&
        !peers_.takes_part(plan_.experts.owner(selection.expert), context.epoch)) {
      selection.expert = -1;
    }
  }
  for (int expert = 0; expert < plan_.experts.num_experts(); ++expert) {
    if (!peers_.takes_part(plan_.experts.owner(expert), context.epoch)) half.sent[expert] = 0;
  }
}

void CpuBuffer::forget(std::span<const int> lost) {
  if (lost.empty()) return;
  for (Half& half : halves_) forget_absent(Context{Operation::kNone, half.dispatch_epoch}, half);
}

// Pairs with the release of the count's header, or of "finished", which both the caller has seen.
std::vector<Word> CpuBuffer::counts_of(int source, int parity) const {
  std::vector<Word> counts(static_cast<std::size_t>(plan_.experts.num_experts()));
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    counts[expert] = word(plan_.rank, plan_.block.count(parity, source, static_cast<int>(expert)))
                         .load(std::memory_order_relaxed);
  }
  return counts;
}

void CpuBuffer::welcome(std::span<const int> coming) {
  for (const int rank : coming) {
    if (rank == plan_.rank) continue;
    // A process of this host that has been replaced was reached through its memory.
    if (peers_.is_elsewhere(rank)) memory_.drop_block(rank);
    if (block(rank) == nullptr || !completed_) continue;  // see enter; or it has gone again
    word(rank, plan_.block.completed(plan_.rank))
        .store(layout::make_word(*completed_, 0), std::memory_order_release);  // publish_completed
  }
  if (!coming.empty()) ring_all();
}

void CpuBuffer::mask(int rank) { peers_.mask(rank, next()); }

void CpuBuffer::unmask(int rank) { peers_.unmask(rank, next()); }

void CpuBuffer::recover() {
  next_epoch_ = peers_.recover(next_epoch_).view.from[plan_.rank];
  held_.clear();
  for (Half& half : halves_) half.combine_epoch.reset();
  // Peers enter once this rank is known to be done with all before.
  publish_completed(next_epoch_ - 1);
}

std::vector<bool> CpuBuffer::active() const {
  std::vector<bool> active(plan_.num_ranks);
  for (const int rank : peers_.active()) active[rank] = true;
  return active;
}

std::vector<bool> CpuBuffer::participants() const {
  std::vector<bool> participants(plan_.num_ranks);
  for (const int rank : peers_.active()) {
    participants[rank] = peers_.takes_part(rank, last_epoch_);
  }
  return participants;
}

}  // namespace tandem::cpu
