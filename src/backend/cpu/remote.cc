// Peers on other hosts: what would be stored into their blocks is sent instead. Rows for one expert
// are written side by side into staging memory, and expert outputs of one source are pushed from
// the combine region, since nobody can pull across hosts; both arrive where the receiver reads
// them.
#include <vector>

#include "backend/cpu/cpu_buffer.h"
#include "tandem/error.h"

namespace tandem::cpu {

std::unique_ptr<runtime::RemotePeers> CpuBuffer::open_remote(runtime::Bootstrap& bootstrap) {
  if (bootstrap.network() == nullptr) return nullptr;
  if (plan_.options.on_timeout != OnTimeout::kFail || !plan_.options.door.empty() ||
      plan_.num_ranks != bootstrap.size()) {
    throw Error(ErrorCode::kUnsupported,
                "on_timeout mask, door and max_ranks: ranks on several hosts cannot be masked, "
                "replaced or added yet");
  }
  const layout::Capacity& capacity = plan_.block.capacity();
  const std::int64_t most_rows = std::int64_t{capacity.max_tokens} * capacity.max_topk;
  auto& doorbell = *reinterpret_cast<layout::Doorbell*>(block(plan_.rank) + plan_.block.doorbell());
  return bootstrap.network()->open(
      {.block = memory_.shared_block(plan_.rank),
       .block_bytes = plan_.block.size_bytes(),
       .control_bytes = plan_.block.doorbell(),
       .staging_bytes = most_rows * capacity.dispatch_pitch,
       .landing_bytes = capacity.combine_rows == 0 ? 0 : most_rows * capacity.combine_pitch,
       .wake = [&doorbell] {
         runtime::fence(
             std::memory_order_seq_cst);  // pairs with the fence in Waiter::prepare_to_sleep
         runtime::ring(doorbell);
       }});
}

void CpuBuffer::refuse_masking_across_hosts() const {
  if (!remote_) return;
  throw Error(ErrorCode::kUnsupported, "ranks on several hosts cannot be masked yet");
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
    if (is_remote(peer)) remote_->send_words(peer, runs);
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

void CpuBuffer::send_rows(const runtime::DispatchCall& call, const Context& context,
                          std::span<const std::int64_t> begin) {
  const Half& half = halves_[call.half];
  const std::int64_t pitch = call.row.pitch();
  for (const int peer : peers_.participants(context)) {
    if (!is_remote(peer)) continue;
    const Region region = region_of(call, context, peer);
    for (const std::int32_t expert : plan_.experts.experts_of(peer)) {
      const std::int32_t count = half.sent[expert];
      if (count == 0) continue;
      remote_->send_to_block(
          peer,
          {.rows = expert_rows_[expert],
           .count = count,
           .pitch = pitch,
           .offset = region.rows + begin[expert] * pitch,
           .epoch = context.epoch},
          std::span(sources_).subspan(static_cast<std::size_t>(own_starts_[expert]),
                                      static_cast<std::size_t>(count)),
          region.sources + begin[expert] * static_cast<std::int64_t>(sizeof(std::int32_t)));
    }
  }
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
  for (int source = 0; source < plan_.num_ranks; ++source) {
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
