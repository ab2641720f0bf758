#include "runtime/membership.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "runtime/memory_file.h"

namespace tandem::runtime {
namespace {

// A proposal cannot be read while its slot is being reused, which takes kNumViews decisions during
// one reading: that often in a row only if somebody scribbles on the board.
constexpr int kMaxReadings = 1000;

// What a rank tells of its operations.
constexpr Status kOfOperations[] = {Status::kFinishedEven, Status::kFinishedOdd, Status::kAt};

Word decision_of(std::uint32_t generation, int proposer) {
  return layout::make_word(generation, static_cast<std::uint32_t>(proposer));
}

Descriptor make_board(std::int64_t size_bytes) {
  MemoryFile file = make_memory_file("tandem board", size_bytes);
  if (!file.problem.empty()) {
    throw Error(ErrorCode::kResource,
                "no board of " + std::to_string(size_bytes) + " bytes: " + file.problem);
  }
  return std::move(file.descriptor);
}

// What peers wrote, as an index that is safe.
int rank_of(Word word, int num_ranks) {
  return static_cast<int>(layout::value_of(word) % static_cast<std::uint32_t>(num_ranks));
}

}  // namespace

Membership::Membership(Bootstrap& bootstrap, int num_ranks, Epoch first_epoch,
                       SymmetricMemory::Kind kind)
    : rank_(bootstrap.rank()),
      num_ranks_(num_ranks),
      board_(num_ranks),
      memory_(bootstrap, "tandem board", board_.size_bytes(), kind),
      view_{.generation = kFirstGeneration,
            .number = kFirstGeneration,
            .proposer = bootstrap.host_ranks().front(),
            .active = std::vector<bool>(num_ranks),
            .from = std::vector<Epoch>(num_ranks, first_epoch),
            .lost = std::vector<bool>(num_ranks)},
      decision_(decision_of(kFirstGeneration, view_.proposer)),
      process_(own_process()),
      is_elsewhere_(num_ranks),
      told_(static_cast<std::size_t>(num_ranks) * layout::kNumStatusWords) {
  is_one_host_ = bootstrap.network() == nullptr;
  if (!is_one_host_) {
    for (auto& rank : is_elsewhere_) rank.store(true, std::memory_order_relaxed);
    for (const int rank : bootstrap.host_ranks()) {
      is_elsewhere_[rank].store(false, std::memory_order_relaxed);
    }
  }
  std::fill_n(view_.active.begin(), bootstrap.size(), true);
  // Peers see what is written here through the caller's barrier.
  if (rank_ == view_.proposer) {
    write(view_, rank_);
    word(board_.decision()).store(decision_, std::memory_order_relaxed);
  }
  tell_no_operation(first_epoch - 1);
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!is_elsewhere(rank)) continue;
    for (const Status status : kOfOperations) note(rank, status, ask(rank_, status));
  }
  introduce();
  tell(Status::kAcked, kFirstGeneration);
}

Membership::Membership(Descriptor board, int rank, int num_ranks)
    : rank_(rank),
      num_ranks_(num_ranks),
      board_(num_ranks),
      memory_(std::move(board), board_.size_bytes()),
      process_(own_process()),
      is_elsewhere_(num_ranks),
      told_(static_cast<std::size_t>(num_ranks) * layout::kNumStatusWords) {
  adopt(newest());
}

Membership::Membership(const Situation& situation, int rank)
    : rank_(rank),
      num_ranks_(situation.num_ranks()),
      board_(num_ranks_),
      memory_(make_board(board_.size_bytes()), board_.size_bytes()),
      view_{.generation = kFirstGeneration,
            .number = situation.number,
            .proposer = rank,
            .active = situation.active,
            .from = situation.from,
            .lost = std::vector<bool>(num_ranks_)},
      decision_(decision_of(kFirstGeneration, rank)),
      process_(own_process()),
      is_elsewhere_(num_ranks_),
      is_one_host_(false),
      num_earlier_starts_(situation.num_starts),
      told_(static_cast<std::size_t>(num_ranks_) * layout::kNumStatusWords) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    is_elsewhere_[peer].store(peer != rank, std::memory_order_relaxed);
    if (peer != rank) forget(peer, situation.near);
  }
  write(view_, rank);
  word(board_.decision()).store(decision_, std::memory_order_relaxed);
  tell_no_operation(situation.near - 1);  // it will be let in for a later one
  introduce();
  tell(Status::kAcked, view_.number);
}

// Nothing has been told, by whoever may be near operation `near`.
void Membership::forget(int rank, Epoch near) {
  for (int status = 0; status < layout::kNumStatusWords; ++status) {
    note(rank, static_cast<Status>(status), 0);
  }
  for (const Status status : {Status::kFinishedEven, Status::kFinishedOdd}) {
    note(rank, status, layout::make_word(near - kLongAgo, 0));
  }
}

bool Membership::let_come(int rank) {
  if (!is_elsewhere(rank) && !is_gone(rank)) return false;
  forget(rank, layout::epoch_of(ask(rank_, Status::kAt)));
  is_elsewhere_[rank].store(true, std::memory_order_release);  // pairs with that in is_elsewhere
  return true;
}

void Membership::tell_no_operation(Epoch last) {
  for (const Status status : kOfOperations) {
    tell(status, layout::make_word(last, 0));
  }
}

void Membership::introduce() {
  tell(Status::kProcess, process_.process);
  tell(Status::kStartTime, process_.start_time);
  tell(Status::kNamespace, process_.pid_namespace);
  tell(Status::kIncarnation, ask(rank_, Status::kIncarnation) + 1);
  introduced_ = true;
}

void Membership::take_over() {
  const ProcessIdentity before = process_of(rank_);
  const bool is_there = before.process != 0 && ask(rank_, Status::kLeft) == 0 &&
                        (before == process_ || !runtime::is_gone(before));
  if (is_there) {
    throw Error(ErrorInfo{.code = ErrorCode::kOrder, .phase = Phase::kSetup, .peer = rank_},
                "rank " + std::to_string(rank_) + " is there already: process " +
                    std::to_string(before.process));
  }
  for (const Status status : {Status::kWriting, Status::kRecovering, Status::kKnocks}) {
    tell(status, 0);
  }
  introduce();
  tell(Status::kLeft, 0);
}

Membership::~Membership() {
  if (introduced_) tell(Status::kLeft, 1);
}

void Membership::write(const View& view, int previous_proposer) {
  const std::int64_t begin = board_.view(rank_, view.generation);
  std::vector<Word> words(static_cast<std::size_t>(board_.view_words()));
  auto next = words.begin();
  *next++ = layout::make_word(view.generation, view.round);
  *next++ = layout::make_word(view.number, static_cast<std::uint32_t>(previous_proposer));
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (view.active[rank]) next[rank / 64] |= Word{1} << (rank % 64);
    if (view.lost[rank]) next[board_.active_words() + rank / 64] |= Word{1} << (rank % 64);
  }
  next += 2 * board_.active_words();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    next[rank / 2] |= Word{view.from[rank]} << (rank % 2 * 32);
  }
  next += board_.from_words();
  if (view.cause) {
    std::vector<std::byte> cause = encode(*view.cause);
    cause.resize(std::min<std::size_t>(cause.size(), layout::kCauseBytes));
    *next++ = cause.size();
    std::memcpy(&*next, cause.data(), cause.size());
  }
  // Whoever reads one of these (acquire, in read) sees the decision that this rank saw before, or a
  // later one, and so that the slot is being reused.
  for (std::size_t i = 0; i < words.size(); ++i) {
    word(begin + static_cast<std::int64_t>(i * sizeof(Word)))
        .store(words[i], std::memory_order_release);
  }
}

bool Membership::propose(View next) {
  // The slot may be that of a proposal which has won, and which peers are about to read.
  const std::lock_guard lock(proposing_);
  if (changed()) return false;
  next.generation = view_.generation + 1;
  if (is_one_host_) next.number = next.generation;
  return decide(next, view_.proposer, decision_);
}

void Membership::amend(const std::function<bool(View&)>& change) {
  const std::lock_guard lock(proposing_);
  for (;;) {
    View next = newest();
    const Word expected = decision_of(next.generation, next.proposer);
    if (!change(next)) return;
    const int previous_proposer = next.proposer;
    ++next.generation;
    if (is_one_host_) next.number = next.generation;
    if (decide(next, previous_proposer, expected)) return;
  }
}

bool Membership::decide(const View& next, int previous_proposer, Word expected) {
  seam_.pass(Point::kProposing);
  write(next, previous_proposer);
  seam_.pass(Point::kProposed);
  // Releases the proposal; pairs with the acquire in newest. In one order with the flags of
  // begin_writing.
  return word(board_.decision())
      .compare_exchange_strong(expected, decision_of(next.generation, rank_),
                               std::memory_order_seq_cst);
}

std::optional<Membership::Read> Membership::read(int proposer, std::uint32_t generation) const {
  const std::int64_t begin = board_.view(proposer, generation);
  std::vector<Word> words(static_cast<std::size_t>(board_.view_words()));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] =
        word(begin + static_cast<std::int64_t>(i * sizeof(Word))).load(std::memory_order_acquire);
  }
  // A proposer takes the same slot again no sooner than for the view kNumViews later, and writes it
  // after it has seen the one before that decided.
  const Word now = word(board_.decision()).load(std::memory_order_relaxed);
  if (layout::epoch_of(now) - generation >= layout::kNumViews - 1) return {};

  auto next = words.begin();
  if (layout::epoch_of(*next) != generation) return {};
  Read result{.view = {.generation = generation,
                       .proposer = proposer,
                       .round = layout::value_of(*next++),
                       .active = std::vector<bool>(num_ranks_),
                       .from = std::vector<Epoch>(num_ranks_),
                       .lost = std::vector<bool>(num_ranks_)},
              .previous_proposer = rank_of(*next, num_ranks_)};
  result.view.number = layout::epoch_of(*next++);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    result.view.active[rank] = (next[rank / 64] >> (rank % 64) & 1) != 0;
    result.view.lost[rank] = (next[board_.active_words() + rank / 64] >> (rank % 64) & 1) != 0;
  }
  next += 2 * board_.active_words();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    result.view.from[rank] = static_cast<Epoch>(next[rank / 2] >> (rank % 2 * 32));
  }
  next += board_.from_words();
  const Word size = std::min<Word>(*next++, layout::kCauseBytes);
  if (size > 0) {
    result.view.cause = decode_failure(
        {reinterpret_cast<const std::byte*>(&*next), static_cast<std::size_t>(size)});
  }
  return result;
}

View Membership::newest() const {
  for (int reading = 0; reading < kMaxReadings; ++reading) {
    const Word now = word(board_.decision()).load(std::memory_order_seq_cst);
    // One that no rank can have made, or that was made before the adopted one, would be news for
    // ever.
    if (now != decision_of(layout::epoch_of(now), rank_of(now, num_ranks_)) ||
        !layout::has_reached(layout::epoch_of(now), adopted_.load(std::memory_order_relaxed))) {
      break;
    }
    std::optional<Read> found = read(rank_of(now, num_ranks_), layout::epoch_of(now));
    if (found) return std::move(found->view);
  }
  throw Error(ErrorCode::kMismatch, "the membership board of this buffer is damaged");
}

std::optional<View> Membership::find(std::uint32_t number) const {
  const Word now = word(board_.decision()).load(std::memory_order_seq_cst);
  int proposer = rank_of(now, num_ranks_);
  for (std::uint32_t at = layout::epoch_of(now);; --at) {
    std::optional<Read> found = read(proposer, at);
    if (!found) return {};
    if (found->view.number == number) return std::move(found->view);
    proposer = found->previous_proposer;
  }
}

void Membership::adopt(View view) {
  seam_.pass(Point::kAdopting);
  view_ = std::move(view);
  decision_ = decision_of(view_.generation, view_.proposer);
  adopted_.store(view_.generation, std::memory_order_relaxed);
  if (introduced_) tell(Status::kAcked, view_.number);
  seam_.pass(Point::kAdopted);
}

ProcessIdentity Membership::process_of(int rank) const {
  return {.process = ask(rank, Status::kProcess),
          .start_time = ask(rank, Status::kStartTime),
          .pid_namespace = ask(rank, Status::kNamespace)};
}

bool Membership::is_gone(int rank) const {
  if (rank == rank_) return false;
  if (ask(rank, Status::kLeft) != 0) return true;
  const ProcessIdentity process = process_of(rank);
  return process != process_ && runtime::is_gone(process);
}

}  // namespace tandem::runtime
