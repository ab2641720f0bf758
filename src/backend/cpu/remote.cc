// Peers on other hosts: words that would be stored into their blocks are sent instead. A token's
// row goes to a peer once, in a parcel (layout/parcel.h), without waiting for anybody's counts; the
// receiver puts copies of it in their places. Expert outputs are pushed from the combine region,
// since nobody can pull across hosts. Both arrive in landing memory: the outputs, then a parcel of
// each source.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/cpu_buffer.h"
#include "core/parcel.h"
#include "tandem/error.h"

namespace tandem::cpu {

std::unique_ptr<runtime::RemotePeers> CpuBuffer::open_remote(runtime::Network* network) {
  if (network == nullptr) return nullptr;
  const layout::Capacity& capacity = plan_.block.capacity();
  auto& doorbell = *reinterpret_cast<layout::Doorbell*>(block(plan_.rank) + plan_.block.doorbell());
  return network->open(
      {.block = memory_.shared_block(plan_.rank),
       .block_bytes = plan_.block.size_bytes(),
       .control_bytes = plan_.block.doorbell(),
       .staging_bytes = std::max(staged_rows() + capacity.max_tokens * capacity.dispatch_pitch,
                                 staged_part_bytes()),
       .landing_bytes = landed_parcel(plan_.num_ranks),
       .wake =
           [&doorbell] {
             runtime::fence(
                 std::memory_order_seq_cst);  // pairs with the fence in Waiter::prepare_to_sleep
             runtime::ring(doorbell);
           },
       .num_ranks = plan_.num_ranks});
}

std::int64_t CpuBuffer::staged_rows() const { return plan_.num_ranks * parcel_.rows(); }

std::int64_t CpuBuffer::landed_parcel(int source) const {
  const layout::Capacity& capacity = plan_.block.capacity();
  const std::int64_t outputs =
      capacity.combine_rows == 0
          ? 0
          : std::int64_t{capacity.max_tokens} * capacity.max_topk * capacity.combine_pitch;
  return layout::round_up(outputs, layout::kControlAlignment) + source * parcel_.size_bytes();
}

void CpuBuffer::publish_remote_header(const Context& context, Word header,
                                      const Arguments& arguments,
                                      std::span<const std::int32_t> counts) {
  const int parity = layout::parity(context.epoch);
  std::vector<Word> count_words;
  for (const std::int32_t count : counts) {
    count_words.push_back(layout::make_word(context.epoch, static_cast<std::uint32_t>(count)));
  }
  std::vector<Word> argument_words;
  for (const std::uint32_t argument : arguments) {
    argument_words.push_back(layout::make_word(context.epoch, argument));
  }
  // The header last: it releases the others.
  const runtime::RemotePeers::WordRun runs[] = {
      {plan_.block.count(parity, plan_.rank, 0), count_words},
      {plan_.block.argument(parity, plan_.rank, layout::Argument{}), argument_words},
      {plan_.block.header(parity, plan_.rank), {&header, 1}}};
  for (const int peer : peers_.active()) {
    if (!is_remote(peer)) continue;
    if (context.operation == Operation::kDispatch) {
      remote_->send_words_with_next(peer, runs);  // its rows follow
    } else {
      remote_->send_words(peer, runs);
    }
  }
}

void CpuBuffer::publish_remote(std::int64_t offset, Word word) {
  const runtime::RemotePeers::WordRun run{offset, {&word, 1}};
  for (const int peer : peers_.active()) {
    if (is_remote(peer)) remote_->send_words(peer, {&run, 1});
  }
}

void CpuBuffer::publish_remote_completed(std::int64_t offset, Word word) {
  const runtime::RemotePeers::WordRun run{offset, {&word, 1}};
  for (const int peer : peers_.active()) {
    if (is_remote(peer)) remote_->send_words_with_next(peer, {&run, 1});
  }
}

bool CpuBuffer::has_left(int peer, Epoch epoch) const {
  return !is_remote(peer) || remote_->has_left(peer, layout::parity(epoch));
}

void CpuBuffer::send_parcels(const runtime::DispatchCall& call, const Context& context) {
  stage_parcels(call, context);
  const int parity = layout::parity(context.epoch);
  const std::int64_t pitch = call.row.pitch();
  const std::byte* const rows = remote_->staging(parity) + staged_rows();
  const std::int64_t parcel = landed_parcel(plan_.rank);
  for (const int peer : peers_.participants(context)) {
    if (!is_remote(peer)) continue;
    const std::int32_t* const list = staged_list(parity, peer);
    const std::int32_t num_rows = list[0];
    if (num_rows == 0) continue;
    remote_->send_to_landing(
        peer, {.rows = reinterpret_cast<const std::byte*>(list),
               .count = 1,
               .pitch = layout::Parcel::list_bytes(num_rows, call.topk, call.partial_sums()),
               .offset = parcel,
               .epoch = context.epoch});
    const auto token = [&](std::int32_t row) {
      return list[layout::Parcel::entry(row, call.topk, call.partial_sums())];
    };
    // Tokens that follow each other lie side by side here and there.
    for (std::int32_t first = 0, last = 0; first < num_rows; first = last) {
      for (++last; last < num_rows && token(last) == token(first) + (last - first);) ++last;
      remote_->send_to_landing(peer, {.rows = rows + token(first) * pitch,
                                      .count = last - first,
                                      .pitch = pitch,
                                      .offset = parcel + parcel_.rows() + first * pitch,
                                      .epoch = context.epoch,
                                      .in_pieces = true});
    }
  }
  publish_remote(plan_.block.arrived(parity, plan_.rank, 0),
                 layout::make_word(context.epoch, kAnyPlan));
}

// Writes the lists for all peers on other hosts, and the rows of all tokens that go to any of them.
void CpuBuffer::stage_parcels(const runtime::DispatchCall& call, const Context& context) {
  write_lists(call, context);
  const int parity = layout::parity(context.epoch);
  const auto* const x = call.x.as<std::byte>();
  const std::int64_t x_pitch = call.x.strides[0] * size_of(call.x.dtype);
  std::byte* const rows = remote_->staging(parity) + staged_rows();
  workers_.run(call.num_tokens, [&](int, std::int64_t first, std::int64_t last) {
    for (std::int64_t token = first; token < last; ++token) {
      if (!staged_[token]) continue;
      std::byte* const row = rows + token * call.row.pitch();
      scatter_row(x + token * x_pitch, call.x.dtype, call.row, {&row, 1}, cached_stores());
    }
  });
}

void CpuBuffer::write_lists(const runtime::DispatchCall& call, const Context& context) {
  Half& half = halves_[call.half];
  const int parity = layout::parity(context.epoch);
  for (int peer = 0; peer < plan_.num_ranks; ++peer) staged_list(parity, peer)[0] = 0;
  std::fill(last_staged_.begin(), last_staged_.end(), -1);
  staged_.assign(static_cast<std::size_t>(call.num_tokens), false);
  half.parts.assign(half.weights.size(), 0);
  for (std::int32_t token = 0; token < call.num_tokens; ++token) {
    const std::int64_t first = std::int64_t{token} * call.topk;
    for (std::int64_t i = first; i < first + call.topk; ++i) {
      if (half.selections[i].expert < 0) continue;
      const int owner = plan_.experts.owner(half.selections[i].expert);
      if (!is_remote(owner)) continue;
      std::int32_t* const list = staged_list(parity, owner);
      if (last_staged_[owner] != token) {
        last_staged_[owner] = token;
        staged_[token] = true;
        std::int32_t* entry =
            list + layout::Parcel::entry(list[0]++, call.topk, call.partial_sums());
        *entry++ = token;
        for (int k = 0; k < call.topk; ++k) *entry++ = half.selections[first + k].expert;
        if (call.partial_sums()) {
          std::memcpy(entry, &half.weights[first], sizeof(float) * call.topk);
        }
      }
      if (call.partial_sums()) half.parts[i] = list[0] - 1;
    }
  }
  // The parts of a peer land behind those of the peers before it.
  for (std::int32_t peer = 0, first_part = 0; peer < plan_.num_ranks; ++peer) {
    std::int32_t* const list = staged_list(parity, peer);
    list[1] = first_part;
    first_part += list[0];
  }
  for (std::size_t i = 0; i < half.parts.size(); ++i) {
    const std::int32_t expert = half.selections[i].expert;
    if (expert >= 0) half.parts[i] += staged_list(parity, plan_.experts.owner(expert))[1];
  }
}

void CpuBuffer::place_parcels(const runtime::DispatchCall& call, const Context& context) {
  for (core::ParcelPlaces& parcel : halves_[call.half].parcels) parcel.tokens.clear();
  for (const int source : peers_.everyone()) {
    if (is_remote(source) && has_arrived(context, source, kAnyPlan)) {
      place_parcel(call, context, source);
    }
  }
}

void CpuBuffer::place_parcel(const runtime::DispatchCall& call, const Context& context,
                             int source) {
  Half& half = halves_[call.half];
  std::int64_t num_places = 0;
  for (std::size_t local = 0; local < half.counts.size(); ++local) {
    num_places += half.ranges[local * plan_.num_ranks + source] & 0xffffffff;
  }
  if (num_places == 0) return;  // nothing was sent
  const std::byte* const parcel =
      remote_->landing(layout::parity(context.epoch)) + landed_parcel(source);
  const std::span list(reinterpret_cast<const std::int32_t*>(parcel),
                       static_cast<std::size_t>(parcel_.rows()) / sizeof(std::int32_t));
  const core::ParcelShape shape{.max_tokens = call.max_tokens,
                                .topk = call.topk,
                                .has_weights = call.partial_sums(),
                                .source = source,
                                .rank = plan_.rank};
  core::ParcelPlaces& found = half.parcels[source];
  if (!core::find_places(list, shape, plan_.experts, {half.offsets, half.ranges}, found)) {
    found.tokens.clear();
    throw Error(ErrorInfo{.code = ErrorCode::kMismatch,
                          .operation = context.operation,
                          .epoch = context.epoch,
                          .phase = Phase::kRows,
                          .peer = source},
                "rank " + std::to_string(source) + " sent rows that its counts do not speak of");
  }

  const bool packed = call.placement == Placement::kPacked;
  const layout::Block& block = plan_.block;
  // A view's row has values and scales as they came, a caller's tensors have them apart.
  std::byte* const rows =
      packed ? own_block() + block.view_rows(call.half) : call.recv_x.as<std::byte>();
  std::int32_t* const tokens =
      packed ? reinterpret_cast<std::int32_t*>(own_block() + block.view_sources(call.half))
             : half.source_tokens.data();
  const std::int64_t row_bytes = packed ? call.row.pitch() : call.row.value_bytes();
  const std::int64_t scale_bytes = packed ? 0 : 4 * std::int64_t{call.row.num_scales()};
  const StoreKind stores = store_kind(num_places * row_bytes);
  workers_.run(static_cast<std::int64_t>(found.tokens.size()), [&](int, std::int64_t first,
                                                                   std::int64_t last) {
    std::array<std::byte*, kMaxTopk> destinations;
    for (std::int64_t row = first; row < last; ++row) {
      const std::byte* const from = parcel + parcel_.rows() + row * call.row.pitch();
      std::size_t num_rows = 0;
      for (std::int64_t i = found.first[row]; i < found.first[row + 1]; ++i) {
        const std::int64_t place = found.places[i];
        destinations[num_rows++] = rows + place * row_bytes;
        tokens[place] = found.tokens[row];
        if (scale_bytes > 0) {
          std::memcpy(call.recv_scales.as<std::byte>() + place * scale_bytes,
                      from + call.row.scales_offset(), static_cast<std::size_t>(scale_bytes));
        }
      }
      scatter_bytes(from, static_cast<std::size_t>(row_bytes), {destinations.data(), num_rows},
                    stores);
    }
    if (stores == StoreKind::kStreaming) finish_streaming();
  });
}

void CpuBuffer::plan_landed(Half& half) {
  const int num_experts = plan_.experts.num_experts();
  for (int source = 0; source < plan_.num_ranks; ++source) {
    if (!is_remote(source)) continue;
    std::int64_t start = 0;
    const std::int32_t* const counts = count_matrix_.data() + std::ptrdiff_t{source} * num_experts;
    for (int expert = 0; expert < num_experts; ++expert) {
      if (plan_.experts.owner(expert) == plan_.rank) {
        half.landed[std::ptrdiff_t{plan_.experts.local_index(expert)} * plan_.num_ranks + source] =
            start;
      }
      start += counts[expert];
    }
  }
}

void CpuBuffer::push_rows(const runtime::CombineCall& call, const Context& context) {
  const Half& half = halves_[call.dispatch.half];
  const std::int64_t pitch = layout::combine_pitch(call.hidden, call.dtype);
  const std::byte* const region = own_block() + plan_.block.combine_rows(call.dispatch.half);
  for (const int source : peers_.active()) {
    if (!is_remote(source)) continue;
    for (std::size_t local = 0; local < half.counts.size(); ++local) {
      const std::size_t run = local * plan_.num_ranks + source;
      const std::int64_t count = half.ranges[run] & 0xffffffff;
      if (count == 0) continue;
      const std::int64_t row = half.offsets[local] + (half.ranges[run] >> 32);
      remote_->send_to_landing(source, {.rows = region + row * pitch,
                                        .count = count,
                                        .pitch = pitch,
                                        .offset = half.landed[run] * pitch,
                                        .epoch = context.epoch});
    }
  }
}

}  // namespace tandem::cpu
