// Dispatch on the CPU: slots, headers and counts, rows, arrival; and the receive phase.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/cpu/cpu_buffer.h"
#include "core/validation.h"
#include "tandem/error.h"

namespace tandem::cpu {
namespace {

// What all ranks of this host write in one operation, beyond which rows are written past the cache.
// Two cores of a Xeon with 2 MB of L2 each and an L3 that they share with others (us, dispatch,
// bf16, ordinary / streaming stores, H = 7168, K = 8): T = 32 207 / 228, 64 421 / 476, 96 572 /
// 695, 128 760 / 767, 256 1587 / 1641, 512 5720 / 4140; where others crowd the L3, 128 1700 / 1000.
constexpr std::int64_t kStreamingBytes = std::int64_t{24} << 20;

}  // namespace

void fill_arguments(const runtime::DispatchCall& call,
                    std::uint32_t (&arguments)[layout::kNumArguments]) {
  arguments[static_cast<int>(layout::Argument::kMaxTokens)] =
      static_cast<std::uint32_t>(call.max_tokens);
  arguments[static_cast<int>(layout::Argument::kShape)] =
      layout::encode(layout::ShapeArgument{.hidden = call.row.hidden,
                                           .topk = call.topk,
                                           .element = static_cast<std::uint32_t>(call.row.format),
                                           .placement = call.placement,
                                           .layout = call.layout,
                                           .partial_sums = call.partial_sums()});
  arguments[static_cast<int>(layout::Argument::kAlignment)] =
      static_cast<std::uint32_t>(call.row_alignment);
}

core::ReceiveShape CpuBuffer::shape_of(const runtime::DispatchCall& call) const {
  return {.placement = call.placement,
          .layout = call.layout,
          .max_tokens = call.max_tokens,
          .topk = call.topk,
          .row_alignment = call.row_alignment,
          .capacity_rows = plan_.block.capacity().rows};
}

StoreKind CpuBuffer::store_kind(std::int64_t num_bytes) const {
  return num_bytes * plan_.num_ranks > kStreamingBytes ? StoreKind::kStreaming : cached_stores();
}

void CpuBuffer::dispatch(const runtime::DispatchCall& call, runtime::Stage stage) {
  if (sends(stage)) {
    // Into scratch first: a refused call must not harm the handle that still owns the half.
    selections_.resize(std::size_t{static_cast<std::size_t>(call.num_tokens)} * call.topk);
    const std::int64_t bad = core::assign_slots(call.topk_idx, selections_, sent_);
    if (bad >= 0) core::refuse_index(bad, call.topk_idx, plan_.experts.num_experts());
    Half& half = halves_[call.half];
    half.selections.swap(selections_);
    half.sent.swap(sent_);
    const auto* const weights = call.topk_weights.as<float>();
    half.weights.assign(weights, weights + (call.partial_sums() ? half.selections.size() : 0));
    const Context context{Operation::kDispatch, next_epoch_++};
    half.dispatch_epoch = context.epoch;
    run(context.epoch, [&] { send_dispatch(call, context); });
    held_.push_back(context.epoch);
  }
  if (receives(stage)) {
    const Context context{Operation::kDispatch, held_.front()};
    held_.pop_front();
    run(context.epoch, [&] { receive_dispatch(call, context); });
  }
}

void CpuBuffer::send_dispatch(const runtime::DispatchCall& call, const Context& context) {
  Half& half = halves_[call.half];
  Arguments arguments;
  tandem::cpu::fill_arguments(call, arguments);
  enter(context);
  forget_absent(context, half);
  half.published = half.sent;
  publish_header(context, call.half, arguments, half.published);
  if (remote_) send_parcels(call, context);
  if (call.placement == Placement::kPacked) return;  // rows wait for the counts
  // A source with too many rows for a rank writes none; all see why in the count matrix.
  if (!core::plan_landing(half.sent, plan_.experts, shape_of(call), plan_.rank, landing_begin_)) {
    while (write_rows(call, context, landing_begin_) == Outcome::kViewChanged) {
    }
  }
  publish_arrived(context, kAnyPlan);
}

void CpuBuffer::receive_dispatch(const runtime::DispatchCall& call, const Context& context) {
  Arguments arguments;
  tandem::cpu::fill_arguments(call, arguments);
  const bool packed = call.placement == Placement::kPacked;
  Plan& plan = received_plan_;
  std::uint32_t written = 0;  // the plan by which this rank's rows lie where they are
  peers_.update(context);
  for (;;) {
    await_headers(context, Phase::kHeader, peers_.everyone(), arguments);
    if (peers_.agree_on_plan(context, plan) == Outcome::kViewChanged) continue;
    seam().pass(Point::kPlanAgreed);
    plan_received(call, context, plan);
    if (packed && written != plan.number) {
      if (write_rows(call, context, halves_[call.half].begin) == Outcome::kViewChanged) continue;
      written = plan.number;
      publish_arrived(context, written);
    }
    if (await_arrived(context, packed ? plan.number : kAnyPlan) == Outcome::kReady) break;
  }
  seam().pass(Point::kRowsCame);
  if (!packed) copy_landed_rows(call, context);
  if (remote_) place_parcels(call, context);
  clear_lost_rows(call, context, plan);
  peers_.finish(context, plan);
  publish_completed(context.epoch);
  peers_.require_still_active(context);
}

// The matrix of counts: zeros for a source that does not count in this plan. That of one that has
// been lost since may have reached only those who finished by the same plan.
void CpuBuffer::read_counts(const runtime::DispatchCall& call, const Context& context,
                            const Plan& plan) {
  const int parity = layout::parity(context.epoch);
  const int num_experts = plan_.experts.num_experts();
  const std::int64_t most = std::int64_t{call.max_tokens} * call.topk;
  for (int source = 0; source < plan_.num_ranks; ++source) {
    std::int32_t* const row = count_matrix_.data() + std::ptrdiff_t{source} * num_experts;
    if (!plan.sources[source]) {
      std::fill_n(row, num_experts, 0);
      continue;
    }
    if (source == plan_.rank) {
      // As they were sent, not as they stand in memory that peers can write: from them follows
      // where this rank writes.
      std::copy_n(halves_[call.half].published.begin(), num_experts, row);
      continue;
    }
    // Pairs with the release in publish_header.
    const bool came =
        layout::epoch_of(
            word(plan_.rank, plan_.block.header(parity, source)).load(std::memory_order_acquire)) ==
        context.epoch;
    const bool copied = !came && plan.witness >= 0;
    if (copied) seam().pass(Point::kTakingOver, plan.witness);
    const std::optional<std::vector<Word>> told =
        copied ? peers_.told_counts(plan.witness, source, context.epoch) : std::nullopt;
    const bool is_at_hand = !copied || block(plan.witness) != nullptr;
    for (int expert = 0; expert < num_experts; ++expert) {
      const std::int64_t offset = plan_.block.count(parity, source, expert);
      Word count = layout::make_word(context.epoch - 1, 0);  // none, unless it can be had
      if (is_at_hand) {
        count = word(copied ? plan.witness : plan_.rank, offset).load(std::memory_order_relaxed);
      } else if (told && told->size() == static_cast<std::size_t>(num_experts)) {
        count = (*told)[expert];
      }
      // For those who will copy from this rank in turn. They look after it has said that it has
      // finished (release).
      if (copied) word(plan_.rank, offset).store(count, std::memory_order_relaxed);
      if (layout::epoch_of(count) != context.epoch || layout::value_of(count) > most) {
        throw Error(ErrorInfo{.code = ErrorCode::kMismatch,
                              .operation = context.operation,
                              .epoch = context.epoch,
                              .phase = Phase::kHeader,
                              .peer = source,
                              .expected = most,
                              .seen = layout::value_of(count)},
                    "rank " + std::to_string(source) +
                        " published an impossible count for expert " + std::to_string(expert));
      }
      row[expert] = static_cast<std::int32_t>(layout::value_of(count));
    }
  }
}

// Works out of the counts where rows go and what comes. Refuses, on all ranks alike, what does not
// fit.
void CpuBuffer::plan_received(const runtime::DispatchCall& call, const Context& context,
                              const Plan& plan) {
  read_counts(call, context, plan);
  const int num_experts = plan_.experts.num_experts();
  Half& half = halves_[call.half];
  const core::ReceiveShape shape = shape_of(call);
  std::optional<core::Excess> excess =
      core::plan_rows(count_matrix_, plan_.experts, shape, plan_.rank, half.begin,
                      {half.counts, half.offsets, half.ranges});
  for (int source = 0; !excess && call.placement == Placement::kSlotted && source < plan_.num_ranks;
       ++source) {
    excess = core::plan_landing(
        std::span(count_matrix_)
            .subspan(std::size_t{static_cast<std::size_t>(source)} * num_experts, num_experts),
        plan_.experts, shape, source, landing_begin_);
  }
  if (!excess) {
    if (remote_) plan_landed(half);
    return;
  }
  peers_.finish(context, plan);
  publish_completed(context.epoch);
  core::refuse_capacity(*excess, context.epoch);
}

// Writes every selected row of an owner on this host to its place: begin[expert] + slot in the
// owner's view or landing region.
Outcome CpuBuffer::write_rows(const runtime::DispatchCall& call, const Context& context,
                              std::span<const std::int64_t> begin) {
  if (peers_.begin_writing(context) == Outcome::kViewChanged) return Outcome::kViewChanged;
  const Half& half = halves_[call.half];
  const std::int64_t pitch = call.row.pitch();
  const StoreKind stores =
      is_fp8(call.row.format)
          ? cached_stores()
          : store_kind(static_cast<std::int64_t>(half.selections.size()) * pitch);

  start_own_rows(half);
  for (const int peer : peers_.participants(context)) {
    const bool is_here = !is_remote(peer);
    const std::int64_t rows = is_here ? region_of(call, context, peer).rows : 0;
    for (const std::int32_t expert : plan_.experts.experts_of(peer)) {
      expert_rows_[expert] = is_here ? block(peer) + rows + begin[expert] * pitch : nullptr;
    }
  }

  seam().pass(Point::kSources);
  write_sources(call, context, begin);
  const auto* const x = call.x.as<std::byte>();
  const std::int64_t x_pitch = call.x.strides[0] * size_of(call.x.dtype);
  const std::byte* const staged =
      remote_ ? remote_->staging(layout::parity(context.epoch)) + staged_rows() : nullptr;
  workers_.run(call.num_tokens, [&](int thread, std::int64_t first, std::int64_t last) {
    std::array<std::byte*, kMaxTopk> destinations;
    for (std::int64_t token = first; token < last; ++token) {
      if (thread == 0) seam().pass(Point::kRow);
      std::size_t num_rows = 0;
      for (int k = 0; k < call.topk; ++k) {
        const core::Selection selection = half.selections[token * call.topk + k];
        if (selection.expert < 0 || expert_rows_[selection.expert] == nullptr) continue;
        destinations[num_rows++] = expert_rows_[selection.expert] + selection.slot * pitch;
      }
      if (num_rows == 0) continue;
      const std::span to(destinations.data(), num_rows);
      if (remote_ && staged_[token]) {  // converted already
        scatter_bytes(staged + token * pitch, static_cast<std::size_t>(pitch), to, stores);
      } else {
        scatter_row(x + token * x_pitch, call.x.dtype, call.row, to, stores);
      }
    }
    if (stores == StoreKind::kStreaming) finish_streaming();
  });
  peers_.end_writing();
  return Outcome::kReady;
}

CpuBuffer::Region CpuBuffer::region_of(const runtime::DispatchCall& call, const Context& context,
                                       int peer) const {
  const int parity = layout::parity(context.epoch);
  if (call.placement == Placement::kSlotted) {
    return {plan_.block.landing_rows(parity), plan_.block.landing_sources(parity)};
  }
  // The half that the peer announced; its header was acquired in await_headers.
  const layout::Header header = layout::decode_header(layout::value_of(
      word(plan_.rank, plan_.block.header(parity, peer)).load(std::memory_order_relaxed)));
  return {plan_.block.view_rows(header.half), plan_.block.view_sources(header.half)};
}

void CpuBuffer::start_own_rows(const Half& half) {
  std::exclusive_scan(half.published.begin(), half.published.end(), own_starts_.begin(),
                      std::int64_t{0});
}

// Writes the source tokens of all rows, expert by expert: in the order of memory, that is, so that
// peers who write between them take each line from each other once rather than at every row.
void CpuBuffer::write_sources(const runtime::DispatchCall& call, const Context& context,
                              std::span<const std::int64_t> begin) {
  const Half& half = halves_[call.half];
  auto selection = half.selections.begin();
  for (std::int32_t token = 0; token < call.num_tokens; ++token) {
    for (int k = 0; k < call.topk; ++k, ++selection) {
      if (selection->expert < 0) continue;
      sources_[own_starts_[selection->expert] + selection->slot] = token;
    }
  }
  for (const int peer : peers_.participants(context)) {
    if (is_remote(peer)) continue;
    auto* const sources =
        reinterpret_cast<std::int32_t*>(block(peer) + region_of(call, context, peer).sources);
    for (const std::int32_t expert : plan_.experts.experts_of(peer)) {
      std::copy_n(sources_.data() + own_starts_[expert], half.sent[expert],
                  sources + begin[expert]);
    }
  }
}

// Slotted placement: from the landing region into the caller's tensors, in final order.
void CpuBuffer::copy_landed_rows(const runtime::DispatchCall& call, const Context& context) {
  Half& half = halves_[call.half];
  const int parity = layout::parity(context.epoch);
  const int num_ranks = plan_.num_ranks;
  const std::span<const std::int32_t> experts = plan_.experts.experts_of(plan_.rank);
  const auto num_runs = static_cast<std::int64_t>(experts.size()) * num_ranks;
  const std::byte* const rows = own_block() + plan_.block.landing_rows(parity);
  const auto* const sources =
      reinterpret_cast<const std::int32_t*>(own_block() + plan_.block.landing_sources(parity));
  const std::int64_t pitch = call.row.pitch();
  const std::int64_t value_bytes = call.row.value_bytes();
  const std::int64_t scale_bytes = 4 * std::int64_t{call.row.num_scales()};
  const std::int64_t limit =
      core::rows_per_source(call.max_tokens, call.topk, static_cast<std::int32_t>(experts.size()));
  auto* const recv_x = call.recv_x.as<std::byte>();
  auto* const recv_scales = call.recv_scales.as<std::byte>();
  const StoreKind stores = store_kind(half.offsets.back() * value_bytes);

  // One run = one (expert, source). Within a source, runs follow each other by expert.
  workers_.run(num_runs, [&](int, std::int64_t first, std::int64_t last) {
    for (std::int64_t run = first; run < last; ++run) {
      const std::int64_t local = run / num_ranks;
      const std::int64_t source = run % num_ranks;
      const std::int64_t count = half.ranges[run] & 0xffffffff;
      if (count == 0 || is_remote(static_cast<int>(source))) continue;
      std::int64_t landed = source * limit;
      for (std::int64_t earlier = 0; earlier < local; ++earlier) {
        landed += half.ranges[earlier * num_ranks + source] & 0xffffffff;
      }
      const std::int64_t row = half.offsets[local] + (half.ranges[run] >> 32);
      std::memcpy(half.source_tokens.data() + row, sources + landed,
                  static_cast<std::size_t>(count) * sizeof(std::int32_t));
      for (std::int64_t i = 0; i < count; ++i) {
        const std::byte* const from = rows + (landed + i) * pitch;
        copy_bytes(recv_x + (row + i) * value_bytes, from, static_cast<std::size_t>(value_bytes),
                   stores);
        if (scale_bytes > 0) {
          std::memcpy(recv_scales + (row + i) * scale_bytes, from + call.row.scales_offset(),
                      static_cast<std::size_t>(scale_bytes));
        }
      }
    }
    if (stores == StoreKind::kStreaming) finish_streaming();
  });
}

// Rows that all ranks have counted, of a source that was lost before it had written them: zeros, of
// token -1.
void CpuBuffer::clear_lost_rows(const runtime::DispatchCall& call, const Context& context,
                                const Plan& plan) {
  if (plan.witness < 0) return;
  const bool packed = call.placement == Placement::kPacked;
  Half& half = halves_[call.half];
  std::byte* const block = own_block();
  std::byte* const rows =
      packed ? block + plan_.block.view_rows(call.half) : call.recv_x.as<std::byte>();
  const std::int64_t pitch = packed ? call.row.pitch() : call.row.value_bytes();
  std::int32_t* const tokens =
      packed ? reinterpret_cast<std::int32_t*>(block + plan_.block.view_sources(call.half))
             : half.source_tokens.data();
  const std::int64_t scale_bytes = packed ? 0 : 4 * std::int64_t{call.row.num_scales()};
  const auto num_local = static_cast<std::int64_t>(half.counts.size());
  for (int source = 0; source < plan_.num_ranks; ++source) {
    if (!plan.sources[source] || peers_.takes_part(source, context.epoch) ||
        has_arrived(context, source, packed ? plan.number : kAnyPlan)) {
      continue;
    }
    for (std::int64_t local = 0; local < num_local; ++local) {
      const std::int64_t range = half.ranges[local * plan_.num_ranks + source];
      const std::int64_t count = range & 0xffffffff;
      const std::int64_t row = half.offsets[local] + (range >> 32);
      std::fill_n(rows + row * pitch, count * pitch, std::byte{0});
      std::fill_n(tokens + row, count, -1);
      if (scale_bytes > 0) {
        std::fill_n(call.recv_scales.as<std::byte>() + row * scale_bytes, count * scale_bytes,
                    std::byte{0});
      }
    }
  }
}

}  // namespace tandem::cpu
