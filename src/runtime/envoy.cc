#include "runtime/envoy.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/waiter.h"

namespace tandem::runtime {
namespace {

// What a rank says of itself, in the order of its note; counts of masked ranks follow: a head, then
// a word for each expert.
constexpr Status kTold[] = {Status::kFinishedEven, Status::kFinishedOdd, Status::kAt,
                            Status::kAcked,        Status::kKnocks,      Status::kSettled};
constexpr std::size_t kNumTold = std::size(kTold);

struct CountsHead {
  std::int32_t source;
  std::int32_t parity;
  std::uint64_t num_words;
};

std::span<const std::byte> bytes_of(std::span<const Word> words) { return std::as_bytes(words); }

}  // namespace

Envoy::Envoy(RemotePeers& remote, Membership& membership, CountsOf counts_of)
    : remote_(remote),
      membership_(membership),
      counts_of_(std::move(counts_of)),
      council_(membership.rank(), membership.view().active, membership.view().number,
               [this](std::uint32_t number, const Change& change) { decided(number, change); }),
      changed_by_(membership.num_ranks(), -1),
      holdings_(membership.num_ranks()),
      told_(membership.num_ranks()),
      answered_(membership.num_ranks()) {
  if (membership.num_earlier_starts()) council_.begin_late(*membership.num_earlier_starts());
  remote_.listen([this](int source, std::span<const std::byte> text) { return take(source, text); },
                 [this](int rank, bool was_there) { return let_come(rank, was_there); });
}

Envoy::~Envoy() { remote_.listen(nullptr, nullptr); }

template <typename Action>
void Envoy::for_each_elsewhere(Action&& action) const {
  for (int rank = 0; rank < membership_.num_ranks(); ++rank) {
    if (membership_.is_elsewhere(rank)) action(rank);
  }
}

RemotePeers::Note Envoy::note(int to, Kind kind, std::span<const std::byte> text) {
  const auto head = std::as_bytes(std::span(&kind, 1));
  RemotePeers::Note result{.to = to, .text = {head.begin(), head.end()}};
  result.text.insert(result.text.end(), text.begin(), text.end());
  return result;
}

Envoy::Notes Envoy::carry(Council::Letters letters) const {
  Notes notes;
  for (const Council::Letter& letter : letters) {
    notes.push_back(note(letter.to, Kind::kLetter, letter.text));
  }
  return notes;
}

void Envoy::propose(std::uint32_t after, const Change& change) {
  Notes notes;
  {
    const std::lock_guard lock(mutex_);
    notes = carry(council_.propose(after, change));
  }
  for (RemotePeers::Note& each : notes) remote_.send_note(std::move(each));
}

bool Envoy::is_quorum(const std::vector<bool>& ranks) const {
  const std::lock_guard lock(mutex_);
  return council_.is_quorum(ranks);
}

std::uint32_t Envoy::number() const {
  const std::lock_guard lock(mutex_);
  return council_.number();
}

std::uint32_t Envoy::num_starts() const {
  const std::lock_guard lock(mutex_);
  return council_.num_starts();
}

int Envoy::changed_by(int rank) const {
  const std::lock_guard lock(mutex_);
  return changed_by_[rank];
}

Envoy::Losses Envoy::losses() const {
  const std::lock_guard lock(mutex_);
  return {.number = council_.number(), .ranks = lost_};
}

Envoy::Settlement Envoy::settlement() const {
  const std::lock_guard lock(mutex_);
  return settlement_;
}

void Envoy::tell_holdings(std::uint32_t number, std::vector<Word> words) {
  std::vector<Word> told{number};
  told.insert(told.end(), words.begin(), words.end());
  for (int rank = 0; rank < membership_.num_ranks(); ++rank) {
    if (rank != membership_.rank()) remote_.send_note(note(rank, Kind::kHoldings, bytes_of(told)));
  }
  const std::lock_guard lock(mutex_);
  holdings_[membership_.rank()] = {.number = number, .words = std::move(words)};
}

bool Envoy::has_told_holdings(int rank, std::uint32_t number) const {
  const std::lock_guard lock(mutex_);
  return holdings_[rank].number == number;
}

std::optional<std::vector<std::vector<Word>>> Envoy::holdings(std::uint32_t number,
                                                              std::span<const int> ranks) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<Word>> all;
  for (const int rank : ranks) {
    if (holdings_[rank].number != number) return {};
    all.push_back(holdings_[rank].words);
  }
  return all;
}

void Envoy::take_holdings(int source, std::span<const std::byte> text) {
  if (text.size() < sizeof(Word) || text.size() % sizeof(Word) != 0) return;
  std::vector<Word> words(text.size() / sizeof(Word));
  std::memcpy(words.data(), text.data(), text.size());
  holdings_[source] = {.number = static_cast<std::uint32_t>(words.front()),
                       .words = {words.begin() + 1, words.end()}};
}

std::optional<Situation> Envoy::situation() const {
  const std::lock_guard lock(mutex_);
  const View view = membership_.newest();
  const int rank = membership_.rank();
  if (view.number != council_.number() || !view.active[rank]) return {};
  return Situation{.teller = rank,
                   .number = view.number,
                   .num_starts = council_.num_starts(),
                   .near = layout::epoch_of(membership_.ask(rank, Status::kAt)),
                   .active = view.active,
                   .from = view.from,
                   .options = {}};
}

bool Envoy::let_come(int rank, bool was_there) {
  const std::lock_guard lock(mutex_);
  // As long as the one before takes part, it is to be missed, and its word to be no other's.
  const std::vector<bool>& members = council_.members();
  if (was_there && members[rank] && members[membership_.rank()]) return false;
  if (!membership_.let_come(rank)) return false;
  told_[rank].clear();
  holdings_[rank] = {};
  return true;
}

void Envoy::take_part() {
  const std::lock_guard lock(mutex_);
  council_.take_part();
}

void Envoy::tell_decisions(int rank) {
  std::vector<std::byte> news;
  {
    const std::lock_guard lock(mutex_);
    news = council_.news();
  }
  remote_.send_note(note(rank, Kind::kLetter, news));
}

void Envoy::tell_decisions_in_order() {
  std::vector<std::byte> news;
  {
    const std::lock_guard lock(mutex_);
    news = council_.news();
  }
  for_each_elsewhere(
      [&](int rank) { remote_.send_note_in_order(note(rank, Kind::kLetter, news)); });
}

void Envoy::tell_standing() {
  for_each_elsewhere(
      [this](int rank) { remote_.send_note_in_order(standing(rank, Kind::kStandingInOrder, 0)); });
}

std::uint32_t Envoy::ask(std::span<const int> ranks) {
  std::uint32_t question = 0;
  {
    const std::lock_guard lock(mutex_);
    question = ++num_questions_;
  }
  const auto text = std::as_bytes(std::span(&question, 1));
  for (const int rank : ranks) remote_.send_note(note(rank, Kind::kQuestion, text));
  return question;
}

bool Envoy::has_answered(int rank, std::uint32_t question) const {
  const std::lock_guard lock(mutex_);
  return answered_[rank] >= question;
}

std::optional<std::vector<Word>> Envoy::told_counts(int witness, int source, Epoch epoch) const {
  const std::lock_guard lock(mutex_);
  for (const Counts& counts : told_[witness]) {
    if (counts.source == source && counts.parity == layout::parity(epoch)) return counts.words;
  }
  return {};
}

// Called by whichever thread takes in what comes. A damaged board is for the caller's thread to
// find.
Envoy::Notes Envoy::take(int source, std::span<const std::byte> text) {
  try {
    return answer(source, text);
  } catch (const Error&) {
    return {};
  }
}

Envoy::Notes Envoy::answer(int source, std::span<const std::byte> text) {
  Kind kind;
  if (text.size() < sizeof kind) return {};
  std::memcpy(&kind, text.data(), sizeof kind);
  text = text.subspan(sizeof kind);
  const std::lock_guard lock(mutex_);
  Notes notes;
  std::uint32_t question = 0;
  switch (kind) {
    case Kind::kLetter:
      notes = carry(council_.take(source, text));
      if (!std::exchange(has_news_, false)) break;
      for (int rank = 0; rank < membership_.num_ranks(); ++rank) {
        if (rank == membership_.rank()) continue;
        notes.push_back(note(rank, Kind::kLetter, council_.news()));
      }
      // Those who now wait for this rank to adopt the view, or to finish the dispatch at hand, may
      // wait for something that is done. A rank that finishes one meanwhile tells so itself
      // (Peers::finish): it notes that and then looks at the decision, here the other way round.
      fence(std::memory_order_seq_cst);
      for_each_elsewhere([&](int rank) { notes.push_back(standing(rank, Kind::kStanding, 0)); });
      break;
    case Kind::kQuestion:
      if (text.size() != sizeof question) break;
      std::memcpy(&question, text.data(), sizeof question);
      // In this order: whoever has been answered knows what has been decided.
      notes.push_back(note(source, Kind::kLetter, council_.news()));
      notes.push_back(standing(source, Kind::kStanding, question));
      break;
    case Kind::kHoldings:
      take_holdings(source, text);
      break;
    case Kind::kStanding:
    case Kind::kStandingInOrder:
      take_standing(source, kind, text);
      break;
  }
  return notes;
}

void Envoy::decided(std::uint32_t number, const Change& change) {
  has_news_ = true;
  note_losses(number, change);
  membership_.amend([&](View& view) {
    if (layout::has_reached(view.number, number))
      return false;  // another rank of this host was first
    view.number = number;
    if (change.kind == Change::Kind::kSettle) return true;
    view.cause = change.cause;
    for (const int rank : change.ranks) {
      view.active[rank] = change.kind == Change::Kind::kUnmask;
      view.from[rank] = change.from;
      view.lost[rank] = change.kind == Change::Kind::kLose;
      // A rank that has been masked may have noted failures that nobody else heard of.
      if (view.active[rank] && !membership_.is_elsewhere(rank)) view.round = 0;
    }
    if (change.kind != Change::Kind::kStart) return true;
    view.round = 0;
    for (int rank = 0; rank < membership_.num_ranks(); ++rank) {
      if (view.active[rank]) view.from[rank] = change.from;
    }
    return true;
  });
  for (int rank = 0; rank < membership_.num_ranks(); ++rank) {
    remote_.heed(rank, council_.members()[rank]);
  }
  // Those who were cut off together with this rank may have told it of failures of theirs.
  if (!council_.members()[membership_.rank()]) remote_.forgive();
}

void Envoy::note_losses(std::uint32_t number, const Change& change) {
  switch (change.kind) {
    case Change::Kind::kSettle:
      settlement_ = {.number = number, .ranks = change.ranks, .words = change.words};
      lost_.clear();
      return;
    case Change::Kind::kStart:  // settles everything
      lost_.clear();
      return;
    case Change::Kind::kLose:
      lost_.insert(lost_.end(), change.ranks.begin(), change.ranks.end());
      break;
    default:
      break;
  }
  for (const int rank : change.ranks) changed_by_[rank] = change.proposer;
}

RemotePeers::Note Envoy::standing(int to, Kind kind, std::uint32_t question) const {
  std::vector<Word> words{question};
  for (const Status status : kTold) words.push_back(membership_.ask(membership_.rank(), status));
  RemotePeers::Note result = note(to, kind, bytes_of(words));
  // Of those lost ranks of which this one has finished a dispatch.
  const View view = membership_.newest();
  for (int source = 0; source < membership_.num_ranks(); ++source) {
    if (view.active[source]) continue;
    for (int parity = 0; parity < 2; ++parity) {
      const Epoch finished = layout::epoch_of(words[1 + static_cast<std::size_t>(parity)]);
      const std::vector<Word> counts = counts_of_(source, parity);
      if (counts.empty() || layout::epoch_of(counts.front()) != finished) continue;
      const CountsHead head{.source = source, .parity = parity, .num_words = counts.size()};
      const auto head_bytes = std::as_bytes(std::span(&head, 1));
      const auto count_bytes = bytes_of(counts);
      result.text.insert(result.text.end(), head_bytes.begin(), head_bytes.end());
      result.text.insert(result.text.end(), count_bytes.begin(), count_bytes.end());
    }
  }
  return result;
}

void Envoy::take_standing(int source, Kind kind, std::span<const std::byte> text) {
  Word words[1 + kNumTold];
  if (!membership_.is_elsewhere(source) || text.size() < sizeof words) return;
  std::memcpy(words, text.data(), sizeof words);
  text = text.subspan(sizeof words);
  std::vector<Counts> all;
  while (text.size() >= sizeof(CountsHead)) {
    CountsHead head;
    std::memcpy(&head, text.data(), sizeof head);
    text = text.subspan(sizeof head);
    if (head.num_words > text.size() / sizeof(Word)) return;
    Counts counts{
        .source = head.source, .parity = head.parity, .words = std::vector<Word>(head.num_words)};
    if (head.num_words > 0) {
      std::memcpy(counts.words.data(), text.data(), head.num_words * sizeof(Word));
    }
    text = text.subspan(head.num_words * sizeof(Word));
    all.push_back(std::move(counts));
  }
  // Before what makes others look for them.
  for (Counts& counts : all) {
    std::erase_if(told_[source], [&](const Counts& old) {
      return old.source == counts.source && old.parity == counts.parity;
    });
    told_[source].push_back(std::move(counts));
  }
  for (std::size_t i = 0; i < kNumTold; ++i) {
    const Status status = kTold[i];
    const Word value = words[1 + i];
    const bool is_finished = status == Status::kFinishedEven || status == Status::kFinishedOdd;
    // The two kinds of notes overtake each other. What only holds behind all rows is told in order.
    if (is_finished && !layout::has_reached(layout::epoch_of(value),
                                            layout::epoch_of(membership_.ask(source, status)))) {
      continue;
    }
    if (!is_finished && status != Status::kAt && kind != Kind::kStandingInOrder) continue;
    membership_.note(source, status, value);
  }
  answered_[source] = std::max(answered_[source], static_cast<std::uint32_t>(words[0]));
}

}  // namespace tandem::runtime
