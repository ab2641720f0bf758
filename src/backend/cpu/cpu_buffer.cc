#include "backend/cpu/cpu_buffer.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>

#include "core/milliseconds.h"
#include "tandem/error.h"

namespace tandem::cpu {
namespace {

std::string list(std::span<const int> ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string_view awaited(Phase phase) {
  switch (phase) {
    case Phase::kEnter:
      return "to complete the operation before last";
    case Phase::kHeader:
      return "to begin this operation";
    case Phase::kRows:
      return "to finish writing rows";
    case Phase::kReady:
      return "to have expert outputs ready";
    case Phase::kCombineHalf:
      return "to finish reading the combine region that is to be reused";
    default:
      return "";
  }
}

}  // namespace

CpuBuffer::CpuBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap,
                     const runtime::BufferPlan& plan)
    : plan_(plan),
      memory_(*bootstrap, plan.block.size_bytes()),
      waiter_(
          *reinterpret_cast<layout::Doorbell*>(memory_.block(plan.rank) + plan.block.doorbell()),
          plan.options.timeout, plan.num_ranks * plan.options.num_threads),
      workers_(plan.options.num_threads),
      all_ranks_(plan.num_ranks),
      next_epoch_(plan.options.first_epoch) {
  const layout::Capacity& capacity = plan.block.capacity();
  const auto num_experts = static_cast<std::size_t>(capacity.num_experts);
  const auto num_local = static_cast<std::size_t>(plan.experts.num_local(plan.rank));
  std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  owners_.reserve(plan.num_ranks);
  regions_.resize(plan.num_ranks);
  combine_regions_.resize(plan.num_ranks);
  const std::size_t most_selections =
      static_cast<std::size_t>(capacity.max_tokens) * static_cast<std::size_t>(capacity.max_topk);
  selections_.reserve(most_selections);
  sources_.resize(most_selections);
  source_starts_.resize(num_experts);
  sent_.resize(num_experts);
  count_matrix_.resize(plan.num_ranks * num_experts);
  landing_begin_.resize(num_experts);
  for (Half& half : halves_) {
    half.selections.reserve(most_selections);
    half.sent.resize(num_experts);
    half.begin.resize(num_experts);
    half.counts.resize(num_local);
    half.offsets.resize(num_local + 1);
    half.ranges.resize(num_local * plan.num_ranks);
    if (capacity.landing_rows > 0) half.source_tokens.resize(capacity.rows);
  }

  // Every word starts as one of the epoch before the first: stale for any wait to come, and
  // completed as far as entering goes. Peers see it through the barrier.
  const Word initial = layout::make_word(next_epoch_ - 1, 0);
  for (std::int64_t offset = 0; offset < plan.block.doorbell(); offset += sizeof(Word)) {
    word(plan.rank, offset).store(initial, std::memory_order_relaxed);
  }
  bootstrap->barrier();
}

runtime::HandleArrays CpuBuffer::handle_arrays(int half) {
  Half& arrays = halves_[half];
  return {arrays.counts.data(), arrays.offsets.data(), arrays.ranges.data(),
          arrays.source_tokens.data()};
}

// Pairs with the fence in Waiter::prepare_to_sleep.
void CpuBuffer::ring_all() {
  full_fence();
  for (const int rank : all_ranks_) {
    ring(*reinterpret_cast<layout::Doorbell*>(block(rank) + plan_.block.doorbell()));
  }
}

template <typename Ready, typename Seen>
void CpuBuffer::await(const Context& context, Phase phase, Epoch wanted, std::span<const int> peers,
                      Ready ready, Seen seen) {
  std::size_t next = 0;  // all before it are ready
  const auto waited = waiter_.wait([&] {
    while (next < peers.size() && ready(peers[next])) ++next;
    return next == peers.size();
  });
  if (!waited) return;
  std::vector<int> missing;
  for (const int peer : peers) {
    if (!ready(peer)) missing.push_back(peer);
  }
  if (missing.empty()) return;  // the last one came while the clock ran out
  throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                        .operation = context.operation,
                        .epoch = context.epoch,
                        .phase = phase,
                        .peer = missing.front(),
                        .expected = wanted,
                        .seen = seen(missing.front()),
                        .waited = *waited,
                        .limit = waiter_.limit()},
              "rank " + std::to_string(plan_.rank) + " waited for rank" +
                  (missing.size() > 1 ? "s " : " ") + list(missing) + ' ' +
                  std::string(awaited(phase)));
}

void CpuBuffer::await_completed(const Context& context, Phase phase, Epoch wanted) {
  const auto seen = [&](int peer) {  // pairs with the release in publish_completed
    return layout::epoch_of(
        word(plan_.rank, plan_.block.completed(peer)).load(std::memory_order_acquire));
  };
  await(
      context, phase, wanted, all_ranks_,
      [&](int peer) { return layout::has_reached(seen(peer), wanted); }, seen);
}

void CpuBuffer::enter(const Context& context) {
  await_completed(context, Phase::kEnter, context.epoch - 2);
}

void CpuBuffer::publish_header(const Context& context, int half, const Arguments& arguments,
                               std::span<const std::int32_t> counts) {
  const int parity = layout::parity(context.epoch);
  const layout::Header header{context.operation, half, layout::hash_arguments(arguments)};
  const Word header_word = layout::make_word(context.epoch, layout::encode(header));
  for (const int peer : all_ranks_) {
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
      word(peer, plan_.block.count(parity, plan_.rank, static_cast<int>(expert)))
          .store(layout::make_word(context.epoch, static_cast<std::uint32_t>(counts[expert])),
                 std::memory_order_relaxed);
    }
    for (int which = 0; which < layout::kNumArguments; ++which) {
      word(peer, plan_.block.argument(parity, plan_.rank, static_cast<layout::Argument>(which)))
          .store(layout::make_word(context.epoch, arguments[which]), std::memory_order_relaxed);
    }
    // Releases counts and arguments, and for a combine the rows staged or written by the caller.
    // Pairs with the acquire in await_headers.
    word(peer, plan_.block.header(parity, plan_.rank))
        .store(header_word, std::memory_order_release);
  }
  ring_all();
}

void CpuBuffer::await_headers(const Context& context, Phase phase, std::span<const int> peers,
                              const Arguments& arguments) {
  const int parity = layout::parity(context.epoch);
  const auto seen = [&](int peer) {  // pairs with the release in publish_header
    return layout::epoch_of(
        word(plan_.rank, plan_.block.header(parity, peer)).load(std::memory_order_acquire));
  };
  await(
      context, phase, context.epoch, peers, [&](int peer) { return seen(peer) == context.epoch; },
      seen);
  for (const int peer : peers) require_same(context, phase, peer, arguments);
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
  const auto tokens = static_cast<int>(layout::Argument::kMaxTokens);
  compare(is_dispatch ? "max_tokens" : "a handle of the dispatch of epoch", theirs[tokens],
          arguments[tokens]);
  const auto alignment = static_cast<int>(layout::Argument::kAlignment);
  compare("row_alignment", theirs[alignment], arguments[alignment]);
  throw Error(info, other + " has other arguments than " + self);
}

void CpuBuffer::publish_arrived(const Context& context) {
  const int parity = layout::parity(context.epoch);
  for (const int peer : all_ranks_) {
    // Releases the rows. Pairs with the acquire in await_arrived.
    word(peer, plan_.block.arrived(parity, plan_.rank, 0))
        .store(layout::make_word(context.epoch, 0), std::memory_order_release);
  }
  ring_all();
}

void CpuBuffer::await_arrived(const Context& context) {
  const int parity = layout::parity(context.epoch);
  const auto seen = [&](int peer) {  // pairs with the release in publish_arrived
    return layout::epoch_of(
        word(plan_.rank, plan_.block.arrived(parity, peer, 0)).load(std::memory_order_acquire));
  };
  await(
      context, Phase::kRows, context.epoch, all_ranks_,
      [&](int peer) { return seen(peer) == context.epoch; }, seen);
}

void CpuBuffer::publish_completed(const Context& context) {
  for (const int peer : all_ranks_) {
    // Orders this rank's reads of the epoch before it: whoever sees the word may overwrite what was
    // read. Pairs with the acquire in await_completed.
    word(peer, plan_.block.completed(plan_.rank))
        .store(layout::make_word(context.epoch, 0), std::memory_order_release);
  }
  ring_all();
}

void CpuBuffer::acquire_combine_half(int half) {
  const std::optional<Epoch> last = halves_[half].combine_epoch;
  if (!last) return;
  await_completed({Operation::kCombine, next_epoch_}, Phase::kCombineHalf, *last);
}

}  // namespace tandem::cpu
