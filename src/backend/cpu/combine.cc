// Combine on the CPU: outputs are staged or already in place, owners say ready, every rank pulls.
#include <algorithm>
#include <array>

#include "backend/cpu/cpu_buffer.h"
#include "tandem/error.h"

namespace tandem::cpu {

void CpuBuffer::fill_arguments(const runtime::CombineCall& call, Arguments& arguments) const {
  // The dispatch's epoch is the same on all ranks, unlike its half or number.
  arguments[static_cast<int>(layout::Argument::kMaxTokens)] =
      halves_[call.dispatch.half].dispatch_epoch;
  arguments[static_cast<int>(layout::Argument::kShape)] =
      layout::encode(layout::ShapeArgument{.hidden = call.hidden,
                                           .topk = call.dispatch.topk,
                                           .element = static_cast<std::uint32_t>(call.dtype),
                                           .placement = call.dispatch.placement,
                                           .layout = call.dispatch.layout,
                                           .partial_sums = call.dispatch.partial_sums()});
  arguments[static_cast<int>(layout::Argument::kAlignment)] =
      static_cast<std::uint32_t>(call.dispatch.row_alignment);
}

void CpuBuffer::combine(const runtime::CombineCall& call, runtime::Stage stage) {
  if (sends(stage)) {
    const Context context{Operation::kCombine, next_epoch_++};
    run(context.epoch, [&] { send_combine(call, context); });
    held_.push_back(context.epoch);
  }
  if (receives(stage)) {
    const Context context{Operation::kCombine, held_.front()};
    held_.pop_front();
    run(context.epoch, [&] { receive_combine(call, context); });
  }
}

void CpuBuffer::send_combine(const runtime::CombineCall& call, const Context& context) {
  Half& half = halves_[call.dispatch.half];
  Arguments arguments;
  fill_arguments(call, arguments);
  enter(context);
  if (!call.zero_copy) {
    if (half.combine_epoch) await_completed(context, Phase::kCombineHalf, *half.combine_epoch);
    seam().pass(Point::kStaging);
    stage_rows(call);
    seam().pass(Point::kStaged);
  }
  if (remote_ && call.dispatch.partial_sums()) {
    push_parts(call, context);
  } else if (remote_) {
    push_rows(call, context);
  }
  half.combine_epoch = context.epoch;
  publish_header(context, call.dispatch.half, arguments, {});
}

void CpuBuffer::receive_combine(const runtime::CombineCall& call, const Context& context) {
  const Half& half = halves_[call.dispatch.half];
  Arguments arguments;
  fill_arguments(call, arguments);
  await_headers(context, Phase::kReady, owners_of(half), arguments);
  // A rank that has been masked may have read what was written over meanwhile: it throws here. One
  // that learns of a loss adds up again without the lost rank, whom its handle no longer names. The
  // fence keeps the reads before the look at the board.
  do {
    seam().pass(Point::kPulling);
    locate_outputs(call, context);
    if (call.dispatch.partial_sums()) {
      add_parts(call, context);
    } else {
      add_rows(call);
    }
    seam().pass(Point::kPulled);
    runtime::fence(std::memory_order_acquire);
  } while (peers_.update(context));
  publish_completed(context.epoch);
}

// The ranks that own an expert of one of this rank's tokens, ascending.
std::span<const int> CpuBuffer::owners_of(const Half& half) {
  owners_.clear();
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    const auto experts = plan_.experts.experts_of(rank);
    if (std::any_of(experts.begin(), experts.end(),
                    [&](std::int32_t expert) { return half.sent[expert] > 0; })) {
      owners_.push_back(rank);
    }
  }
  return owners_;
}

// Copies the rows that hold tokens into the combine region.
void CpuBuffer::stage_rows(const runtime::CombineCall& call) {
  const Half& half = halves_[call.dispatch.half];
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  const auto row_bytes = static_cast<std::size_t>(call.hidden) * size_of(call.dtype);
  const auto* const y = call.y.as<std::byte>();
  const std::int64_t y_pitch = call.y.strides[call.y.num_dims - 2] * size_of(call.dtype);
  std::byte* const region = own_block() + plan_.block.combine_rows(call.dispatch.half);
  std::int64_t num_rows = 0;
  for (const std::int32_t count : half.counts) num_rows += count;
  const StoreKind stores = store_kind(num_rows * pitch);
  workers_.run(static_cast<std::int64_t>(half.counts.size()),
               [&](int, std::int64_t first, std::int64_t last) {
                 for (std::int64_t local = first; local < last; ++local) {
                   for (std::int64_t i = 0; i < half.counts[local]; ++i) {
                     const std::int64_t row = half.offsets[local] + i;
                     copy_bytes(region + row * pitch, y + row * y_pitch, row_bytes, stores);
                   }
                 }
                 if (stores == StoreKind::kStreaming) finish_streaming();
               });
}

// expert_rows_: where the outputs lie for this rank's rows, which are numbered by slot.
void CpuBuffer::locate_outputs(const runtime::CombineCall& call, const Context& context) {
  const Half& half = halves_[call.dispatch.half];
  const int parity = layout::parity(context.epoch);
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  start_own_rows(half);
  for (const int owner : owners_) {
    // The half that the owner announced; its header was acquired in await_headers.
    const layout::Header header = layout::decode_header(layout::value_of(
        word(plan_.rank, plan_.block.header(parity, owner)).load(std::memory_order_relaxed)));
    for (const std::int32_t expert : plan_.experts.experts_of(owner)) {
      expert_rows_[expert] =
          is_remote(owner)
              ? remote_->landing(parity) + own_starts_[expert] * pitch
              : block(owner) + plan_.block.combine_rows(header.half) + half.begin[expert] * pitch;
    }
  }
}

void CpuBuffer::add_rows(const runtime::CombineCall& call) {
  const Half& half = halves_[call.dispatch.half];
  const int topk = call.dispatch.topk;
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  const auto* const weights = call.weights.as<float>();
  auto* const out = call.out.as<std::byte>();
  const std::int64_t out_pitch = call.out.strides[0] * size_of(call.dtype);
  workers_.run(call.dispatch.num_tokens, [&](int, std::int64_t first, std::int64_t last) {
    std::array<const std::byte*, kMaxTopk> rows;
    std::array<float, kMaxTopk> row_weights;
    for (std::int64_t token = first; token < last; ++token) {
      std::size_t num_rows = 0;
      for (int k = 0; k < topk; ++k) {
        const core::Selection selection = half.selections[token * topk + k];
        if (selection.expert < 0) continue;
        rows[num_rows] = expert_rows_[selection.expert] + selection.slot * pitch;
        row_weights[num_rows++] = weights[token * topk + k];
      }
      combine_row({rows.data(), num_rows}, {row_weights.data(), num_rows}, call.dtype, call.hidden,
                  out + token * out_pitch);
    }
  });
}

}  // namespace tandem::cpu
