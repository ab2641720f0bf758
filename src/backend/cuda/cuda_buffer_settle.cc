// Ranks that are lost in the midst of an operation, across hosts: what cuda_buffer_watch.cc does by
// reading and writing the blocks of all who go on, done by each of them for its own block
// (settlement.h), by what all have decided. All with the buffer's mutex locked.
#include <algorithm>
#include <span>
#include <string>

#include "backend/cuda/cuda_buffer.h"
#include "backend/cuda/cuda_check.h"
#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::cuda {

using layout::Word;

// What this rank's block holds of a lost rank's announcements. Nothing of that rank comes any more:
// of one on another host since the view was adopted (Roster::adopt), and what has come is copied.
Holding CudaBuffer::holding_of(int lost) {
  roster_->look({});
  if (peers_->block(lost) != nullptr) bring_to_rest(lost, {});
  Holding holding;
  const Announcement words = staged_announcement(plan_.rank);
  for (int parity = 0; parity < 2; ++parity) {
    copy_announcement(plan_.rank, parity, lost, cudaMemcpyDeviceToHost);
    finish_copies();
    holding.words[parity] = {words.begin(), words.end()};
  }
  return holding;
}

// One step after the other, at each look; any of those who go on may have it decided.
void CudaBuffer::settle_losses(LateRanks::Time now) {
  runtime::Envoy& envoy = roster_->envoy();
  go_by_settlement();
  const runtime::Envoy::Losses losses = envoy.losses();
  if (losses.ranks.empty() || losses.number != roster_->view().number) return;
  if (told_losses_ != losses.number) {
    relay_->await_copies();
    std::vector<Word> words;
    for (const int lost : losses.ranks) {
      for (const auto& part : holding_of(lost).words) {
        words.insert(words.end(), part.begin(), part.end());
      }
    }
    if (losses.number != roster_->view().number) return;
    envoy.tell_holdings(losses.number, std::move(words));
    told_losses_ = losses.number;
    told_losses_at_ = now;
  }
  const auto told = envoy.holdings(losses.number, roster_->active());
  if (!told) return mask_silent(losses, now);
  std::vector<layout::Epoch> near;
  for (const int lost : losses.ranks) near.push_back(roster_->view().from[lost] - 1);
  auto words = settle_all(*told, near, static_cast<std::size_t>(announcement_words(plan_.block)));
  if (!words) {
    throw Error(ErrorCode::kMismatch, "what ranks hold of a lost one's words has another size");
  }
  roster_->settle(
      {.kind = runtime::Change::Kind::kSettle, .ranks = losses.ranks, .words = *std::move(words)});
  roster_->look({});
  go_by_settlement();
}

// Whoever goes on, but does not say what it holds, is lost too.
void CudaBuffer::mask_silent(const runtime::Envoy::Losses& losses, LateRanks::Time now) {
  const bool is_late = now - told_losses_at_ >= plan_.options.timeout;
  std::vector<int> silent;
  std::optional<std::string> why;
  for (const int rank : roster_->active()) {
    if (rank == plan_.rank || roster_->envoy().has_told_holdings(rank, losses.number)) continue;
    const auto gone = roster_->gone(rank);
    if (gone) why = gone;
    if (gone || is_late) silent.push_back(rank);
  }
  if (silent.empty()) return;
  roster_->mask(silent,
                {.info = {.code = why ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
                          .epoch = roster_->view().from[losses.ranks.front()] - 1,
                          .phase = Phase::kMembership,
                          .peer = silent.front(),
                          .limit = plan_.options.timeout},
                 .message = runtime::list_ranks(silent) + ' ' +
                            why.value_or("did not say what it holds of a lost rank's rows")});
  roster_->look({});
}

// The roster word last: kernels that find it go by what stands beside it.
void CudaBuffer::go_by_settlement() {
  const runtime::Envoy::Settlement settlement = roster_->envoy().settlement();
  if (settlement.number == settled_ ||
      !layout::has_reached(roster_->view().number, settlement.number)) {
    return;
  }
  const auto num_words = static_cast<std::size_t>(announcement_words(plan_.block));
  std::span<const Word> words = settlement.words;
  for (const int lost : settlement.ranks) {
    const std::size_t size = std::min(words.size(), settlement_words(num_words));
    const auto decoded = decode_settlement(words.first(size), num_words);
    if (!decoded) throw Error(ErrorCode::kMismatch, "a settlement of another size");
    words = words.subspan(size);
    const layout::Epoch near = roster_->view().from[lost] - 1;
    for (int parity = 0; parity < 2; ++parity) {
      copy_announcement(plan_.rank, parity, lost, cudaMemcpyDeviceToHost);
      finish_copies();
      if (apply(*decoded, parity, staged_announcement(plan_.rank), near)) {
        copy_announcement(plan_.rank, parity, lost, cudaMemcpyHostToDevice);
        finish_copies();
      }
    }
    staging_word() = layout::make_word(decoded->end, layout::value_of(pending_word(lost)));
    copy_words(own_block() + plan_.block.roster(lost), &staging_word(), sizeof(Word));
    finish_copies();
  }
  settled_ = settlement.number;
  roster_->tell_settled(settled_);
}

}  // namespace tandem::cuda
