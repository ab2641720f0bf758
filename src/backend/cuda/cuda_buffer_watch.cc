// Masking ranks that miss the timeout, in the middle of operations (docs/failures.md). A kernel
// that waits cannot look at the board: it says in pinned memory for whom it waits, and a thread of
// this buffer reads that, has the rank masked, and tells the kernels of all who go on. Before that
// it halts the lost rank's kernels, so that none of them writes to anybody any more; the rank's own
// process may be stopped.
#include <algorithm>
#include <atomic>
#include <new>
#include <span>
#include <string>

#include "backend/cuda/cuda_buffer.h"
#include "backend/cuda/cuda_check.h"
#include "runtime/deadline.h"
#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::cuda {

using runtime::Context;

namespace {

// How often a wait notes that it lasts: what noticing an ended process takes at most.
std::chrono::nanoseconds note_interval(std::chrono::nanoseconds timeout) {
  using std::chrono_literals::operator""ms;
  return std::clamp<std::chrono::nanoseconds>(timeout / 4, 2ms, 20ms);
}

}  // namespace

// Pinned memory. The announcements of one lost rank, as they lie in the blocks of others, follow.
struct CudaBuffer::Shared {
  layout::Word waits[kMaxRanks];  // what this rank's kernels note, by rank
  std::uint8_t halt;              // what the top byte of a count of blocks at work is set to
};

void CudaBuffer::allocate_watch() {
  const std::int64_t words = plan_.num_ranks * announcement_words(plan_.block);
  shared_memory_ = allocate_mapped_host(
      device_, std::int64_t{sizeof(Shared)} + words * std::int64_t{sizeof(layout::Word)});
  shared_ = new (shared_memory_.get()) Shared();
  const std::chrono::nanoseconds interval = note_interval(plan_.options.timeout);
  late_.emplace(plan_.num_ranks, interval);
  void* waits = nullptr;
  check_cuda(cudaHostGetDevicePointer(&waits, shared_->waits, 0), "cudaHostGetDevicePointer");
  watch_view_.waits = static_cast<layout::Word*>(waits);
  watch_view_.note_ns = static_cast<std::uint64_t>(interval.count());
}

Announcement CudaBuffer::staged_announcement(int holder) const {
  const std::int64_t size = announcement_words(plan_.block);
  auto* const words = reinterpret_cast<layout::Word*>(shared_memory_.get() + sizeof(Shared));
  return {words + holder * size, static_cast<std::size_t>(size)};
}

void CudaBuffer::start_watch() {
  if (!is_watched()) return;
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void CudaBuffer::watch(const std::stop_token& stop) {
  // The caller may be capturing: what is called here must not be taken for a part of that.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  warn_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  warn_cuda(cudaSetDevice(device_), "cudaSetDevice");
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<void*> stale;
    try {
      const std::lock_guard lock(mutex_);
      try {
        look_after_kernels();
      } catch (const Error& error) {
        roster_->fail(error);
      }
      // Unmapping waits for kernels at work, which may need this thread: not while there are any.
      if (peers_->has_stale() && load_at_work(plan_.rank) == 0) stale = peers_->take_stale();
    } catch (const Error& error) {
      // Nobody can be told; the kernels' waits end by themselves.
      std::fprintf(stderr, "tandem: %s\n", error.what());
      return;
    }
    PeerMemory::close_stale(stale);  // without the lock: a kernel may have started since
  }
}

void CudaBuffer::look_after_kernels() {
  roster_->look({});
  if (roster_->view().round != 0) return;  // all stop, and start anew
  if (const std::optional<runtime::Failure> failure = fatal_failure()) {
    return roster_->fail(Error(failure->info, failure->message));
  }
  if (!roster_->is_active(plan_.rank)) {
    // Its peers halt it too, but for those on other hosts.
    const std::uint32_t generation = roster_->view().generation;
    const bool is_news = std::exchange(judged_by_, generation) != generation;
    if (is_news && roster_->view().lost[plan_.rank]) halt(plan_.rank);
    return;
  }
  if (has_door()) roster_->meet_waiting();
  const auto now = std::chrono::steady_clock::now();
  if (judged_by_ != roster_->view().generation) {
    judged_by_ = roster_->view().generation;
    late_->restart(now);
  }
  take_notes(now);
  const int awaited = late_->first();
  if (awaited >= 0 || says_it_waits_) {
    const layout::Epoch epoch = awaited < 0 ? 0 : late_->of(awaited)->epoch;
    roster_->tell_waiting_for({.operation = Operation::kNone, .epoch = epoch}, awaited);
    says_it_waits_ = awaited >= 0;
  }
  if (relay_) settle_losses(now);
  if (awaited < 0) return;
  mask_late(now);
  // Whoever had it decided may be lost itself before it has told all: who still waits does it.
  std::optional<LateRanks::Wait> newest;
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    const auto& wait = late_->of(rank);
    if (!wait || !roster_->view().lost[rank]) continue;
    if (wait->last == now) newest = wait;
    late_->forget(rank);  // when it is let in again it is not late yet
  }
  if (newest && !relay_) write_roster({.operation = newest->operation, .epoch = newest->epoch});
}

void CudaBuffer::take_notes(LateRanks::Time now) {
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    // Relaxed: the note is all there is. One that comes between the two is followed by another.
    std::atomic_ref note(shared_->waits[rank]);
    const layout::Word word = note.load(std::memory_order_relaxed);
    if (word != 0) note.store(0, std::memory_order_relaxed);
    late_->take(rank, word, now);
  }
}

// Whom this rank misses: as on CPUs, a rank that waits for somebody itself is spared once.
void CudaBuffer::mask_late(LateRanks::Time now) {
  const std::chrono::nanoseconds limit = plan_.options.timeout;
  std::vector<int> gone;
  std::vector<int> late;
  std::vector<int> very_late;
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    const auto& wait = late_->of(rank);
    // One that was masked by a call takes part for a while, and may be missed in that.
    if (!wait || rank == plan_.rank || roster_->view().lost[rank]) continue;
    if (roster_->gone(rank)) gone.push_back(rank);
    const bool is_very_late = (now - wait->since) / 2 >= limit;
    if (is_very_late) very_late.push_back(rank);
    if (now - wait->since >= limit && (!wait->spared || is_very_late)) late.push_back(rank);
  }
  std::vector<int> culprits = gone;
  if (culprits.empty() && !late.empty()) {
    roster_->ask_elsewhere(late);
    culprits = roster_->not_waiting(late);
  }
  if (culprits.empty()) culprits = very_late;
  if (culprits.empty()) {
    for (const int rank : late) late_->spare(rank);
    return;
  }

  const int culprit = culprits.front();
  const LateRanks::Wait& wait = *late_->of(culprit);
  const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(now - wait.since);
  roster_->mask(
      culprits,
      {.info = {.code = gone.empty() ? ErrorCode::kTimeout : ErrorCode::kPeerLost,
                .operation = wait.operation,
                .epoch = wait.epoch,
                .phase = wait.phase,
                .peer = culprit,
                .expected = wait.epoch,
                .waited = waited,
                .limit = limit},
       .message = "rank " + std::to_string(plan_.rank) + " waited for " +
                  runtime::list_ranks(culprits) + ' ' + std::string(runtime::awaited(wait.phase)) +
                  (gone.empty() ? "" : "; it " + roster_->gone(culprit).value_or("has ended"))});
  roster_->look({});
}

std::uint32_t CudaBuffer::load_at_work(int rank) {
  return layout::value_of(read_words(peers_->block(rank) + plan_.block.at_work(), 1).front());
}

// What `rank` has launched and will launch is to end, whatever its host does.
void CudaBuffer::halt(int rank) {
  // The top byte alone, as blocks count in the others meanwhile.
  shared_->halt = 1;
  static_assert(layout::kHalted == 1U << 24);
  copy_words(peers_->block(rank) + plan_.block.at_work() + 3, &shared_->halt, 1);
  finish_copies();
}

// Nothing of `rank`, which is halted, is at work, so nothing of it writes to peers any more.
bool CudaBuffer::is_at_rest(int rank) { return load_at_work(rank) == layout::kHalted; }

// Halts this rank and waits until it is at rest. False: something does not end.
bool CudaBuffer::come_to_rest() {
  halt(plan_.rank);
  const auto deadline =
      runtime::Deadline::after(std::chrono::ceil<std::chrono::milliseconds>(plan_.options.timeout));
  while (!is_at_rest(plan_.rank)) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

// Until a lost rank of this host is at rest: what it was writing to is about to be read, and used
// again. The block of a process that has ended is nobody's any more.
void CudaBuffer::bring_to_rest(int rank, const Context& context) {
  const auto is_gone = [&] { return roster_->gone(rank).has_value(); };
  if (is_gone()) return;
  halt(rank);
  roster_->await_end_of_writes(rank, context, [&] { return is_gone() || is_at_rest(rank); });
}

// Before kernels may be launched again. Whoever would halt this rank by an older view has been
// waited for.
void CudaBuffer::resume() {
  staging_word() = 0;
  copy_words(own_block() + plan_.block.at_work(), &staging_word(), sizeof(layout::Word));
  finish_copies();
  late_->forget();
  std::fill_n(shared_->waits, plan_.num_ranks, 0);
}

void CudaBuffer::copy_announcement(int holder, int parity, int source, cudaMemcpyKind kind) {
  layout::Word* words = staged_announcement(holder).data();
  for (const AnnouncementPiece& piece : announcement_pieces(plan_.block, parity, source)) {
    std::byte* const there = peers_->block(holder) + piece.offset;
    const std::size_t num_bytes = static_cast<std::size_t>(piece.num_words) * sizeof(layout::Word);
    const bool fetches = kind == cudaMemcpyDeviceToHost;
    check_cuda(cudaMemcpyAsync(fetches ? static_cast<void*>(words) : there,
                               fetches ? static_cast<const void*>(there) : words, num_bytes, kind,
                               side_stream_),
               "cudaMemcpyAsync");
    words += piece.num_words;
  }
}

// Once a lost rank is at rest: all who go on count it in or leave it out alike, in each of the
// operations that it had announced to some of them. Returns the first from which on it has
// announced nothing to anybody.
layout::Epoch CudaBuffer::settle_announcements(int rank) {
  const layout::Epoch near = roster_->view().from[rank] - 1;
  bring_to_rest(rank, {.operation = Operation::kNone, .epoch = near});
  const std::span<const int> holders = roster_->active();
  std::vector<Announcement> announcements;
  for (const int holder : holders) announcements.push_back(staged_announcement(holder));
  layout::Epoch last = near - 2;  // with that it was done long ago
  for (int parity = 0; parity < 2; ++parity) {
    for (const int holder : holders) {
      copy_announcement(holder, parity, rank, cudaMemcpyDeviceToHost);
    }
    finish_copies();
    const std::optional<layout::Epoch> newest = newest_announced(announcements, near);
    if (newest && layout::has_reached(*newest, last)) last = *newest;
    const std::vector<bool> changed = agree_on_announcement(announcements, near);
    for (std::size_t i = 0; i < holders.size(); ++i) {
      if (changed[i]) copy_announcement(holders[i], parity, rank, cudaMemcpyHostToDevice);
    }
    finish_copies();
  }
  return last + 1;
}

}  // namespace tandem::cuda
