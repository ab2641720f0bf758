// Combine by partial sums, for dispatches that had the tokens' weights: each rank adds up what its
// experts give to a token, its part, and the source adds up the parts. Between hosts a part is what
// travels, instead of a row for each expert. A source that shares memory with an owner makes the
// owner's parts itself: the sum is the same wherever ranks are.
#include <algorithm>
#include <array>

#include "backend/cpu/cpu_buffer.h"

namespace tandem::cpu {

std::int64_t CpuBuffer::staged_part_bytes() const {
  const layout::Capacity& capacity = plan_.block.capacity();
  const std::int64_t parts = std::int64_t{plan_.num_ranks} * capacity.max_tokens;
  return std::min(parts, capacity.combine_rows) * capacity.combine_pitch;
}

void CpuBuffer::push_parts(const runtime::CombineCall& call, const Context& context) {
  const Half& half = halves_[call.dispatch.half];
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  const std::byte* const region = own_block() + plan_.block.combine_rows(call.dispatch.half);
  std::byte* parts = remote_->staging(layout::parity(context.epoch));
  for (const int source : peers_.active()) {
    const core::ParcelPlaces& parcel = half.parcels[source];
    const auto num_parts = static_cast<std::int64_t>(parcel.tokens.size());
    if (!is_remote(source) || num_parts == 0) continue;
    workers_.run(num_parts, [&](int, std::int64_t first, std::int64_t last) {
      std::array<const std::byte*, kMaxTopk> rows;
      for (std::int64_t part = first; part < last; ++part) {
        const std::int64_t begin = parcel.first[part];
        const auto num_rows = static_cast<std::size_t>(parcel.first[part + 1] - begin);
        for (std::size_t i = 0; i < num_rows; ++i) {
          rows[i] = region + parcel.places[begin + i] * pitch;
        }
        combine_row({rows.data(), num_rows}, {&parcel.weights[begin], num_rows}, call.dtype,
                    call.hidden, parts + part * pitch);
      }
    });
    remote_->send_to_landing(source, {.rows = parts,
                                      .count = num_parts,
                                      .pitch = pitch,
                                      .offset = parcel.first_part * pitch,
                                      .epoch = context.epoch,
                                      .in_pieces = true});
    parts += num_parts * pitch;
  }
}

void CpuBuffer::add_parts(const runtime::CombineCall& call, const Context& context) {
  const Half& half = halves_[call.dispatch.half];
  const int topk = call.dispatch.topk;
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  const std::byte* const landed =
      remote_ ? remote_->landing(layout::parity(context.epoch)) : nullptr;
  auto* const out = call.out.as<std::byte>();
  const std::int64_t out_pitch = call.out.strides[0] * size_of(call.dtype);
  std::array<float, kMaxTopk> ones;
  ones.fill(1.0F);
  own_parts_.resize(static_cast<std::size_t>(plan_.options.num_threads * topk * pitch));
  workers_.run(call.dispatch.num_tokens, [&](int thread, std::int64_t first, std::int64_t last) {
    std::array<int, kMaxTopk> owners;
    std::array<const std::byte*, kMaxTopk> parts;
    std::array<const std::byte*, kMaxTopk> rows;
    std::array<float, kMaxTopk> weights;
    std::byte* const own_parts = own_parts_.data() + thread * topk * pitch;
    for (std::int64_t token = first; token < last; ++token) {
      const core::Selection* const selections = &half.selections[token * topk];
      for (int k = 0; k < topk; ++k) {
        owners[k] = selections[k].expert < 0 ? -1 : plan_.experts.owner(selections[k].expert);
      }
      std::size_t num_parts = 0;
      for (int k = 0; k < topk; ++k) {
        const int owner = owners[k];
        if (owner < 0) continue;
        if (is_remote(owner)) {
          parts[num_parts++] = landed + half.parts[token * topk + k] * pitch;
          std::replace(owners.begin() + k, owners.begin() + topk, owner, -1);
          continue;
        }
        std::size_t num_rows = 0;
        for (int of = k; of < topk; ++of) {
          if (owners[of] != owner) continue;
          rows[num_rows] = expert_rows_[selections[of].expert] + selections[of].slot * pitch;
          weights[num_rows++] = half.weights[token * topk + of];
          owners[of] = -1;
        }
        std::byte* const part = own_parts + static_cast<std::int64_t>(num_parts) * pitch;
        combine_row({rows.data(), num_rows}, {weights.data(), num_rows}, call.dtype, call.hidden,
                    part);
        parts[num_parts++] = part;
      }
      combine_row({parts.data(), num_parts}, {ones.data(), num_parts}, call.dtype, call.hidden,
                  out + token * out_pitch);
    }
  });
}

}  // namespace tandem::cpu
