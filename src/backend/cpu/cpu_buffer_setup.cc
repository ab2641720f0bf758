// Making a CPU buffer: together with the other ranks, or as a process that joins them later.
#include <algorithm>
#include <optional>

#include "backend/cpu/cpu_buffer.h"
#include "runtime/agreement.h"
#include "tandem/error.h"

namespace tandem::cpu {
namespace {

runtime::SymmetricMemory::Kind kind_of(const runtime::BufferPlan& plan) {
  return plan.options.door.empty() ? runtime::SymmetricMemory::Kind::kPlain
                                   : runtime::SymmetricMemory::Kind::kAlwaysFile;
}

}  // namespace

// Braces evaluate in order, as the collective steps inside must be.
CpuBuffer::CpuBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap,
                     const runtime::BufferPlan& plan)
    : CpuBuffer(plan,
                Shared{.memory = runtime::SymmetricMemory(*bootstrap, plan.block.size_bytes(),
                                                          kind_of(plan)),
                       .membership = std::make_unique<runtime::Membership>(
                           *bootstrap, plan.num_ranks, plan.options.first_epoch, kind_of(plan))},
                bootstrap->network()) {
  // Every word starts as one of the epoch before the first: stale for any wait to come, and
  // completed as far as entering goes. Peers see it through the barrier.
  set_words(next_epoch_ - 1);
  completed_ = next_epoch_ - 1;
  if (remote_ == nullptr) {
    bootstrap->barrier();
    return;
  }
  std::optional<Error> problem;
  try {
    peers_.open_door(plan.options);
  } catch (const Error& error) {
    problem = error;
  }
  runtime::agree(*bootstrap, problem);  // and thereby a barrier
}

CpuBuffer::CpuBuffer(const runtime::BufferPlan& plan, runtime::Descriptor board)
    : CpuBuffer(plan,
                Shared{.memory = runtime::SymmetricMemory(plan.rank, plan.num_ranks,
                                                          plan.block.size_bytes()),
                       .membership = std::make_unique<runtime::Membership>(
                           std::move(board), plan.rank, plan.num_ranks)},
                nullptr) {
  next_epoch_ = peers_.take_over();
  set_words(next_epoch_ - 2);
}

CpuBuffer::CpuBuffer(const runtime::BufferPlan& plan, const runtime::Situation& situation,
                     runtime::Network& network)
    : CpuBuffer(plan,
                Shared{.memory = runtime::SymmetricMemory(plan.rank, plan.num_ranks,
                                                          plan.block.size_bytes()),
                       .membership = std::make_unique<runtime::Membership>(situation, plan.rank)},
                &network) {
  next_epoch_ = situation.near;
  set_words(next_epoch_ - 2);
  peers_.arrive();
  peers_.open_door(plan.options);
}

CpuBuffer::CpuBuffer(const runtime::BufferPlan& plan, Shared&& shared, runtime::Network* network)
    : plan_(plan),
      memory_(std::move(shared.memory)),
      workers_(plan.options.num_threads),
      parcel_(plan.block.capacity()),
      remote_(open_remote(network)),
      peers_(plan,
             *reinterpret_cast<layout::Doorbell*>(memory_.block(plan.rank) + plan.block.doorbell()),
             remote_.get(), std::move(shared.membership),
             {.ring = [this] { ring_all(); },
              .forget = [this](std::span<const int> lost) { forget(lost); },
              .meet = [this](int rank) { return meet(rank); },
              .welcome = [this](std::span<const int> coming) { welcome(coming); },
              .counts_of = [this](int source, int parity) { return counts_of(source, parity); }}),
      next_epoch_(plan.options.first_epoch) {
  memory_.make_room(plan.num_ranks);
  const layout::Capacity& capacity = plan.block.capacity();
  const auto num_experts = static_cast<std::size_t>(capacity.num_experts);
  const auto num_local = static_cast<std::size_t>(plan.experts.num_local(plan.rank));
  owners_.reserve(plan.num_ranks);
  expert_rows_.resize(num_experts);
  const std::size_t most_selections =
      static_cast<std::size_t>(capacity.max_tokens) * static_cast<std::size_t>(capacity.max_topk);
  selections_.reserve(most_selections);
  sources_.resize(most_selections);
  own_starts_.resize(num_experts);
  last_staged_.resize(plan.num_ranks);
  sent_.resize(num_experts);
  count_matrix_.resize(plan.num_ranks * num_experts);
  landing_begin_.resize(num_experts);
  for (Half& half : halves_) {
    half.selections.reserve(most_selections);
    half.sent.resize(num_experts);
    half.published.resize(num_experts);
    half.begin.resize(num_experts);
    half.counts.resize(num_local);
    half.offsets.resize(num_local + 1);
    half.ranges.resize(num_local * plan.num_ranks);
    half.landed.resize(num_local * plan.num_ranks);
    half.parcels.resize(plan.num_ranks);
    if (capacity.landing_rows > 0) half.source_tokens.resize(capacity.rows);
  }
}

void CpuBuffer::set_words(Epoch epoch) {
  const Word initial = layout::make_word(epoch, 0);
  for (std::int64_t offset = 0; offset < plan_.block.doorbell(); offset += sizeof(Word)) {
    word(plan_.rank, offset).store(initial, std::memory_order_relaxed);
  }
}

bool CpuBuffer::meet(int rank) {
  seam().pass(Point::kVisiting, rank);
  const auto offer = runtime::visit_door(plan_.options.door, rank, plan_.options.timeout);
  if (!offer) return false;
  memory_.set_block(rank, offer->block);
  seam().pass(Point::kVisited, rank);
  return true;
}

runtime::Offer CpuBuffer::offer() const {
  return {.num_ranks = plan_.num_ranks,
          .options = {},
          .block = memory_.file().duplicate(),
          .board = peers_.board().duplicate()};
}

}  // namespace tandem::cpu
