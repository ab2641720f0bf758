// Who takes part, on GPUs: errors are told to all, ranks are masked and let in, and start anew
// after a failure. The Roster decides on the host; what kernels go by, the roster and stop words in
// every rank's block, is written here by copies on a stream of their own (docs/failures.md).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_buffer.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/error_text.h"
#include "tandem/error.h"

namespace tandem::cuda {

using runtime::Context;

// Copies to and from the device go through here; it is pinned.
struct CudaBuffer::Staging {
  DeviceState state;
  layout::Word words[kMaxRanks];
};

void CudaBuffer::allocate_staging() {
  staging_memory_ = allocate_mapped_host(device_, sizeof(Staging));
  staging_ = new (staging_memory_.get()) Staging();
}

void CudaBuffer::copy_words(std::byte* to, const void* from, std::int64_t size_bytes) {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(size_bytes), cudaMemcpyHostToDevice,
                             side_stream_),
             "cudaMemcpyAsync");
}

layout::Word& CudaBuffer::staging_word() { return staging_->words[0]; }

void CudaBuffer::finish_copies() {
  check_cuda(cudaStreamSynchronize(side_stream_), "cudaStreamSynchronize");
}

// Waits for the last call's operations; those of a replay are the caller's to wait for.
void CudaBuffer::await_last_call() {
  if (last_event_ != nullptr && !last_was_captured_) {
    // Not by the side stream: a copy engine that is to copy behind an operation would keep copies
    // of other ranks waiting, which that operation may wait for.
    check_cuda(cudaEventSynchronize(last_event_), "cudaEventSynchronize");
  }
}

// While this waits for operations, the buffer's thread may have to look after them.
DeviceState CudaBuffer::read_state() {
  await_last_call();
  const std::lock_guard lock(mutex_);
  return load_state();
}

DeviceState CudaBuffer::load_state() {
  check_cuda(cudaMemcpyAsync(&staging_->state, view_.state, sizeof(DeviceState),
                             cudaMemcpyDeviceToHost, side_stream_),
             "cudaMemcpyAsync");
  finish_copies();
  return staging_->state;
}

// Of an operation to begin with, when nothing is at work.
DeviceState CudaBuffer::first_state(layout::Epoch epoch, std::uint32_t generation) const {
  DeviceState state;
  state.send.epoch = epoch;
  state.receive.epoch = epoch;
  for (HalfState& half : state.half) half.combine_epoch = epoch - 1;
  state.recovered = generation;
  state.watch = watch_view_;
  return state;
}

std::vector<layout::Word> CudaBuffer::read_words(const void* from, int num_words) {
  const auto size_bytes = static_cast<std::size_t>(num_words) * sizeof(layout::Word);
  check_cuda(
      cudaMemcpyAsync(staging_->words, from, size_bytes, cudaMemcpyDeviceToHost, side_stream_),
      "cudaMemcpyAsync");
  finish_copies();
  return {staging_->words, staging_->words + num_words};
}

std::vector<layout::Word> CudaBuffer::read_roster() {
  return read_words(own_block() + plan_.block.roster(0), plan_.num_ranks);
}

layout::Word CudaBuffer::pending_word(int rank) const {
  return cuda::pending_word(roster_->view(), rank);
}

// Roster words of all ranks. This rank's kernels know which changes are so old that epochs tell
// nothing any more. A view that is decided and not told is a failure of all.
void CudaBuffer::write_roster(const Context& next) {
  try {
    roster_->write_view(next, [this] { write_roster_words(); });
  } catch (const Error& error) {
    roster_->fail(error);
    throw;
  }
}

void CudaBuffer::write_roster_words() {
  std::vector<layout::Word> words = read_roster();
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    const layout::Word word = pending_word(rank);
    if (roster_->view().lost[rank]) {
      if ((layout::value_of(words[rank]) & layout::kRosterLost) != 0) continue;
      words[rank] = layout::make_word(settle_announcements(rank), layout::value_of(word));
    } else if (words[rank] != layout::settled(word)) {
      words[rank] = word;
    }
  }
  std::copy(words.begin(), words.end(), staging_->words);
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    // A lost rank's kernels are at rest; its block may be that of a process that has ended.
    if (peers_->block(rank) == nullptr || roster_->view().lost[rank] || roster_->gone(rank)) {
      continue;
    }
    copy_words(peers_->block(rank) + plan_.block.roster(0), staging_->words,
               plan_.num_ranks * std::int64_t{sizeof(layout::Word)});
  }
  finish_copies();
}

// Ends the kernels of all ranks that wait, and those that are queued behind, if the newest view
// says that operations cannot go on.
void CudaBuffer::stop_if_failed() {
  const std::uint32_t round = roster_->round();
  if (round == 0) return;
  const DeviceScope scope(device_);
  staging_->words[0] = layout::make_word(round, 1);
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    if (peers_->block(rank) == nullptr) continue;  // on another host: the relay tells it
    copy_words(peers_->block(rank) + plan_.block.stop(), staging_->words, sizeof(layout::Word));
  }
  finish_copies();
}

std::optional<ErrorRecord> CudaBuffer::take_record() {
  std::atomic_ref written(record_->written);
  if (written.load(std::memory_order_acquire) == 0) return {};
  const std::lock_guard lock(record_mutex_);
  const ErrorRecord record = *record_;
  if (!is_fatal(record)) {
    // The buffer stays usable: the next error may be recorded.
    written.store(0, std::memory_order_release);
    check_cuda(cudaMemsetAsync(&view_.state->record_taken, 0, sizeof(std::uint32_t), side_stream_),
               "cudaMemsetAsync");
  }
  return record;
}

void CudaBuffer::check(runtime::Stage stage) {
  const Context context;
  bool found_out = false;  // by its own kernels that it is masked
  std::unique_lock lock(mutex_);
  if (const std::optional<ErrorRecord> record = take_record()) {
    found_out = static_cast<ErrorCode>(record->code) == ErrorCode::kMasked;
    try {
      if (!found_out) throw_record(*record);
    } catch (const Error& error) {
      if (!is_fatal(*record)) throw;
      roster_->fail(error);
      roster_->look(context);
      roster_->require_sound(context);  // the same error on all ranks
      throw;
    }
  } else if (relay_) {
    if (const auto trouble = relay_->trouble()) {
      roster_->fail(Error(trouble->info, trouble->message));
    }
  }
  roster_->look(context);
  roster_->require_sound(context);
  if (roster_->is_active(plan_.rank)) return;
  if (roster_->view().lost[plan_.rank]) roster_->require_active(context);
  lock.unlock();
  const DeviceScope scope(device_);
  const DeviceState state = read_state();
  lock.lock();
  const layout::Epoch next = runtime::sends(stage) ? state.send.epoch : state.receive.epoch;
  if (found_out || layout::has_reached(next, roster_->view().from[plan_.rank])) {
    roster_->require_active(context);
  }
}

void CudaBuffer::throw_record(const ErrorRecord& record) const {
  const bool is_lost = static_cast<ErrorCode>(record.code) == ErrorCode::kPeerLost;
  throw_error(record, plan_, is_lost ? relay_->why_lost(record.peer) : "");
}

// What this rank's kernels have failed with, if that is for good: for the peers on other hosts.
std::optional<runtime::Failure> CudaBuffer::fatal_failure() const {
  if (std::atomic_ref(record_->written).load(std::memory_order_acquire) == 0) return {};
  const std::lock_guard lock(record_mutex_);
  const ErrorRecord record = *record_;
  if (record.written == 0 || !is_fatal(record)) return {};
  if (static_cast<ErrorCode>(record.code) == ErrorCode::kMasked) return {};  // others go on
  try {
    throw_record(record);
  } catch (const Error& error) {
    return runtime::Failure{.info = error.info(), .message = error.message()};
  }
}

// A roster word tells of one change: not of the next before all are past it.
void CudaBuffer::require_settled(int rank, layout::Epoch next) {
  const layout::Word known = read_roster()[rank];
  const layout::Word pending = pending_word(rank);
  const runtime::View& view = roster_->view();
  const bool is_told = view.lost[rank] ? (layout::value_of(known) & layout::kRosterLost) != 0
                                       : layout::settled(known) == layout::settled(pending);
  if (is_told && layout::has_settled(known, next)) return;
  throw Error(ErrorInfo{.code = ErrorCode::kOrder, .peer = rank},
              "rank " + std::to_string(rank) + (view.active[rank] ? " is let in" : " is left out") +
                  " from operation " + std::to_string(view.from[rank]) +
                  " on, and that may be changed two operations later");
}

// After this rank has had it decided that another takes part, or no more: the others' kernels hear
// of it before they hear of this rank's next operation.
void CudaBuffer::tell_change(int rank, const Context& next) {
  if (!relay_) return write_roster(next);
  try {
    roster_->write_view(next, [&] { write_roster_word(rank); });
  } catch (const Error& error) {
    roster_->fail(error);
    throw;
  }
  relay_->tell_roster_word(rank, pending_word(rank));
}

// The word of one rank, into the blocks of those that share memory with this one.
void CudaBuffer::write_roster_word(int rank) {
  staging_word() = pending_word(rank);
  for (int peer = 0; peer < plan_.num_ranks; ++peer) {
    if (peers_->block(peer) == nullptr || roster_->view().lost[peer] || roster_->gone(peer)) {
      continue;
    }
    copy_words(peers_->block(peer) + plan_.block.roster(rank), &staging_word(),
               sizeof(layout::Word));
  }
  finish_copies();
}

void CudaBuffer::mask(int rank) {
  check();
  const DeviceScope scope(device_);
  const Context next{.operation = Operation::kNone, .epoch = read_state().send.epoch};
  const std::lock_guard lock(mutex_);
  if (rank != plan_.rank && roster_->is_active(rank)) require_settled(rank, next.epoch);
  if (roster_->mask(rank, next)) tell_change(rank, next);
}

void CudaBuffer::unmask(int rank) {
  check();
  const DeviceScope scope(device_);
  const Context next{.operation = Operation::kNone, .epoch = read_state().send.epoch};
  const std::lock_guard lock(mutex_);
  if (!roster_->is_active(rank) && roster_->waits(rank)) {
    require_settled(rank, next.epoch);
    // No kernel may look for its memory before it finds it.
    if (has_door() && !roster_->has_been_met(rank)) {
      throw Error(ErrorInfo{.code = ErrorCode::kOrder, .peer = rank},
                  "rank " + std::to_string(rank) +
                      " waits to be let in, but not all ranks have mapped its memory yet");
    }
    if (relay_ && !roster_->all_have_settled()) {
      throw Error(ErrorInfo{.code = ErrorCode::kOrder, .peer = rank},
                  "rank " + std::to_string(rank) +
                      " waits to be let in, but not all ranks have gone on without it yet");
    }
  }
  if (roster_->unmask(rank, next)) tell_change(rank, next);
}

void CudaBuffer::recover() {
  const DeviceScope scope(device_);
  const std::lock_guard lock(mutex_);
  staging_->words[0] = 1;
  copy_words(reinterpret_cast<std::byte*>(&view_.state->failed), staging_->words,
             sizeof view_.state->failed);
  finish_copies();
  await_last_call();
  if (is_watched() && !come_to_rest()) {
    throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                          .phase = Phase::kMembership,
                          .peer = plan_.rank,
                          .limit = plan_.options.timeout},
                "rank " + std::to_string(plan_.rank) + " waited for its own kernels to end");
  }
  // The operation that failed has taken its epoch, but has not moved on.
  const layout::Epoch next = load_state().send.epoch + 1;
  if (relay_) relay_->rest(next + 2);
  const runtime::Roster::Start start = roster_->recover(next);
  if (relay_) relay_->await_leaving(roster_->active());
  const layout::Epoch epoch = start.view.from[plan_.rank];
  const Context first{.operation = Operation::kNone, .epoch = epoch};
  if (start.let_in) {
    await_roster(first);
  } else {
    start_together(first, start.view);
  }
  if (is_watched()) resume();
  if (relay_) settled_ = roster_->envoy().settlement().number;  // of before
  staging_->state = first_state(epoch, start.view.generation);
  copy_words(reinterpret_cast<std::byte*>(view_.state), &staging_->state, sizeof(DeviceState));
  staging_->words[0] = 0;
  copy_words(own_block() + plan_.block.stop(), staging_->words, sizeof(layout::Word));
  finish_copies();
  {
    const std::lock_guard record_lock(record_mutex_);
    *record_ = ErrorRecord();
  }
  if (relay_) relay_->resume();
}

// Whoever has let this rank in writes all roster words into its block, but from another host, where
// only those are told that change.
void CudaBuffer::await_roster(const Context& first) {
  if (relay_) {
    roster_->write_view(first, [&] {
      for (int rank = 0; rank < plan_.num_ranks; ++rank) {
        staging_->words[rank] = word_from(roster_->view(), rank, first.epoch);
      }
      write_own_roster();
    });
    return;
  }
  const auto here = [&] { return read_roster()[plan_.rank] == pending_word(plan_.rank); };
  roster_->await(here, first);
  roster_->write_view(first, [] {});  // all of them, once nobody writes
}

// No kernel of any rank that takes part is at work, and peers write nothing here before this rank
// takes part in what follows, but for roster words of a later view.
void CudaBuffer::start_together(const Context& first, const runtime::View& then) {
  const std::int64_t size_bytes = plan_.num_ranks * std::int64_t{sizeof(layout::Word)};
  std::fill_n(staging_->words, plan_.num_ranks, layout::make_word(first.epoch - 1, 0));
  copy_words(own_block() + plan_.block.completed(0), staging_->words, size_bytes);
  finish_copies();
  roster_->write_view(first, [&] {
    for (int rank = 0; rank < plan_.num_ranks; ++rank) {
      const runtime::View& now = roster_->view();
      const bool stays = now.active[rank] == then.active[rank] && now.from[rank] == then.from[rank];
      const layout::Word word = pending_word(rank);
      staging_->words[rank] = stays ? layout::settled(word) : word;
    }
    write_own_roster();
  });
}

// What is staged.
void CudaBuffer::write_own_roster() {
  copy_words(own_block() + plan_.block.roster(0), staging_->words,
             plan_.num_ranks * std::int64_t{sizeof(layout::Word)});
  finish_copies();
}

// Maps the block of the process that is this rank now. While it waits to be let in, not before
// nothing of this rank's touches its predecessor's any more: kernels have found that the mask is
// old. They look addresses up when they start, captured ones too, and use this one when the rank
// takes part again.
bool CudaBuffer::meet(int rank) {
  if (!roster_->is_active(rank) &&
      (layout::value_of(read_roster()[rank]) & layout::kRosterPending) != 0) {
    return false;
  }
  const auto offer = runtime::visit_door(plan_.options.door, rank, plan_.options.timeout);
  if (!offer) return false;
  std::byte* const block = map_offered_block(offer->block, device_);
  if (block == nullptr) return false;
  peers_->set_block(rank, block);
  staging_->words[0] = reinterpret_cast<std::uintptr_t>(block);
  copy_words(reinterpret_cast<std::byte*>(const_cast<std::byte**>(view_.blocks + rank)),
             staging_->words, sizeof block);
  finish_copies();
  return true;
}

std::vector<bool> CudaBuffer::active() const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> active(plan_.num_ranks);
  for (const int rank : roster_->active()) active[rank] = true;
  return active;
}

std::vector<bool> CudaBuffer::participants_of(const runtime::DispatchCall& dispatch,
                                              std::vector<bool> noted) {
  const DeviceScope scope(device_);
  if (is_watched()) await_last_call();  // in which ranks may yet be lost
  std::unique_lock lock(mutex_);
  roster_->look({});
  if (roster_->view().generation == runtime::kFirstGeneration) return noted;
  lock.unlock();
  const HalfState half = read_state().half[dispatch.half];
  if (half.dispatch_id != dispatch.id) return noted;
  const bool combined = layout::has_reached(half.combine_epoch, half.dispatch_epoch);
  const layout::Epoch epoch = combined ? half.combine_epoch : half.dispatch_epoch;
  lock.lock();
  const std::vector<layout::Word> words = read_roster();
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    noted[rank] = layout::takes_part(words[rank], epoch);
  }
  if (!is_watched()) return noted;
  const std::vector<layout::Word> absent = read_words(
      watch_view_.absent + std::ptrdiff_t{dispatch.half} * plan_.num_ranks, plan_.num_ranks);
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    if (absent[rank] == layout::make_word(epoch, 1)) noted[rank] = false;
  }
  return noted;
}

std::optional<Error> CudaBuffer::last_loss() const {
  const std::lock_guard lock(mutex_);
  return roster_->last_loss();
}

std::vector<int> CudaBuffer::waiting() const {
  const std::lock_guard lock(mutex_);
  return roster_->waiting();
}

}  // namespace tandem::cuda
