#include "runtime/council.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"

namespace tandem::runtime {
namespace {

using core::append;
using core::take_front;

// Decisions that a letter of news tells. Whoever has missed more is lost.
constexpr std::size_t kRemembered = 32;

// Of a cause's text: news fit into one message (remote_link.cc).
constexpr std::size_t kMaxCauseText = 512;

constexpr int kRankBits = 16;

struct EncodedChange {
  std::uint32_t kind;
  std::int32_t proposer;
  std::uint32_t from;
  std::uint32_t num_ranks;
  std::uint64_t num_words;
};

struct EncodedText {
  std::uint32_t kind;
  std::uint32_t number;
  std::uint64_t ballot;
  std::uint64_t accepted_in;
};

}  // namespace

std::vector<std::byte> encode(const Change& change) {
  const EncodedChange head{.kind = static_cast<std::uint32_t>(change.kind),
                           .proposer = change.proposer,
                           .from = change.from,
                           .num_ranks = static_cast<std::uint32_t>(change.ranks.size()),
                           .num_words = change.words.size()};
  std::vector<std::byte> bytes;
  append(bytes, head);
  append(bytes, std::span<const int>(change.ranks));
  append(bytes, std::span<const layout::Word>(change.words));
  if (change.cause) {
    Failure cause = *change.cause;
    cause.message.resize(std::min(cause.message.size(), kMaxCauseText));
    const std::vector<std::byte> encoded = encode(cause);
    append(bytes, std::span<const std::byte>(encoded));
  }
  return bytes;
}

std::optional<Change> decode_change(std::span<const std::byte> bytes, int num_ranks) {
  const auto in_range = [num_ranks](int rank) { return rank >= 0 && rank < num_ranks; };
  const auto head = take_front<EncodedChange>(bytes);
  if (!head || head->kind > static_cast<std::uint32_t>(Change::Kind::kSettle) ||
      !in_range(head->proposer) || head->num_ranks > static_cast<std::uint32_t>(num_ranks) ||
      head->num_words > bytes.size() / sizeof(layout::Word)) {
    return {};
  }
  Change change{.kind = static_cast<Change::Kind>(head->kind),
                .proposer = head->proposer,
                .from = head->from};
  for (std::uint32_t i = 0; i < head->num_ranks; ++i) {
    const auto rank = take_front<int>(bytes);
    if (!rank || !in_range(*rank)) return {};
    change.ranks.push_back(*rank);
  }
  for (std::uint64_t i = 0; i < head->num_words; ++i) {
    const auto word = take_front<layout::Word>(bytes);
    if (!word) return {};
    change.words.push_back(*word);
  }
  if (!bytes.empty()) {
    change.cause = decode_failure(bytes);
    if (!change.cause) return {};
  }
  return change;
}

// A letter. `changes`: the value of a promise (what was accepted, if anything) or an accept; the
// decisions up to `number` of news, and of a prepare, whose reader may not know them.
struct Council::Text {
  Kind kind = Kind::kNews;
  std::uint32_t number = 0;  // of the decision that it is about
  Ballot ballot = 0;
  Ballot accepted_in = 0;
  std::vector<Change> changes = {};

  [[nodiscard]] std::vector<std::byte> encoded() const {
    const EncodedText head{.kind = static_cast<std::uint32_t>(kind),
                           .number = number,
                           .ballot = ballot,
                           .accepted_in = accepted_in};
    std::vector<std::byte> bytes;
    append(bytes, head);
    for (const Change& change : changes) {
      const std::vector<std::byte> encoded = encode(change);
      const auto length = static_cast<std::uint32_t>(encoded.size());
      append(bytes, length);
      append(bytes, std::span<const std::byte>(encoded));
    }
    return bytes;
  }

  static std::optional<Text> decoded(std::span<const std::byte> bytes, int num_ranks) {
    const auto head = take_front<EncodedText>(bytes);
    if (!head || head->kind > static_cast<std::uint32_t>(Kind::kNews)) return {};
    Text text{.kind = static_cast<Kind>(head->kind),
              .number = head->number,
              .ballot = head->ballot,
              .accepted_in = head->accepted_in};
    while (!bytes.empty()) {
      const auto length = take_front<std::uint32_t>(bytes);
      if (!length || *length > bytes.size() || text.changes.size() == kRemembered) return {};
      auto change = decode_change(bytes.first(*length), num_ranks);
      if (!change) return {};
      text.changes.push_back(std::move(*change));
      bytes = bytes.subspan(*length);
    }
    const bool has_value =
        text.kind == Kind::kAccept || (text.kind == Kind::kPromise && text.accepted_in != 0);
    if (has_value && text.changes.size() != 1) return {};
    return text;
  }
};

Council::Council(int rank, std::vector<bool> members, std::uint32_t number, Decided decided)
    : rank_(rank),
      members_(std::move(members)),
      number_(number),
      decided_(std::move(decided)),
      agreeing_(members_.size()) {}

void Council::begin_late(std::uint32_t num_starts) {
  num_starts_ = num_starts;
  only_listens_ = true;
}

bool Council::is_quorum(const std::vector<bool>& ranks) const {
  int present = 0;
  int all = 0;
  for (std::size_t rank = 0; rank < members_.size(); ++rank) {
    all += members_[rank] ? 1 : 0;
    present += members_[rank] && ranks[rank] ? 1 : 0;
  }
  const auto lowest = std::find(members_.begin(), members_.end(), true) - members_.begin();
  return 2 * present > all || (2 * present == all && all > 0 && ranks[lowest]);
}

Council::Letters Council::propose(std::uint32_t after, const Change& change) {
  if (after != number_ || !members_[rank_] || only_listens_) return {};
  ballot_ = ++turn_ << kRankBits | static_cast<Ballot>(rank_);
  is_accepting_ = false;
  proposed_ = change;
  proposed_in_ = 0;
  std::fill(agreeing_.begin(), agreeing_.end(), false);
  Text text = own_news();
  text.kind = Kind::kPrepare;
  text.number = number_ + 1;
  text.ballot = ballot_;
  send_members(text);
  return post();
}

Council::Letters Council::take(int from, std::span<const std::byte> bytes) {
  const auto text = Text::decoded(bytes, static_cast<int>(members_.size()));
  if (!text) return {};
  handle(from, *text);
  return post();
}

std::vector<std::byte> Council::news() const { return own_news().encoded(); }

Council::Text Council::own_news() const {
  return {.kind = Kind::kNews, .number = number_, .changes = {log_.begin(), log_.end()}};
}

void Council::send(int to, const Text& text) {
  letters_.push_back({.to = to, .text = text.encoded()});
}

void Council::send_all(const Text& text) {
  for (std::size_t rank = 0; rank < members_.size(); ++rank) send(static_cast<int>(rank), text);
}

void Council::send_members(const Text& text) {
  for (std::size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank]) send(static_cast<int>(rank), text);
  }
}

// What this rank says to itself it hears at once.
Council::Letters Council::post() {
  Letters others;
  while (!letters_.empty()) {
    for (Letter& letter : std::exchange(letters_, {})) {
      if (letter.to != rank_) {
        others.push_back(std::move(letter));
      } else if (const auto text = Text::decoded(letter.text, static_cast<int>(members_.size()))) {
        handle(rank_, *text);
      }
    }
  }
  return others;
}

void Council::handle(int from, const Text& text) {
  if (text.kind == Kind::kNews) return learn(text);
  if (text.kind == Kind::kPrepare) {
    Text before = text;
    --before.number;
    learn(before);
  }
  if (only_listens_) return;
  const bool is_question = text.kind == Kind::kPrepare || text.kind == Kind::kAccept;
  if (text.number != number_ + 1) {
    // Decided already: whoever asks is told so.
    if (is_question && layout::has_reached(number_, text.number)) send(from, own_news());
    return;
  }
  if (!members_[from]) return;
  turn_ = std::max(turn_, text.ballot >> kRankBits);
  switch (text.kind) {
    case Kind::kPrepare:
      return on_prepare(from, text);
    case Kind::kPromise:
      return on_promise(from, text);
    case Kind::kAccept:
      return on_accept(from, text);
    case Kind::kAccepted:
      return on_accepted(from, text);
    default:  // kRefused: the turn has been noted
      return;
  }
}

void Council::on_prepare(int from, const Text& text) {
  Text answer{.kind = Kind::kRefused, .number = text.number, .ballot = promised_};
  if (text.ballot > promised_) {
    promised_ = text.ballot;
    answer.kind = Kind::kPromise;
    answer.ballot = text.ballot;
    answer.accepted_in = accepted_in_;
    if (accepted_) answer.changes = {*accepted_};
  }
  send(from, answer);
}

void Council::on_promise(int from, const Text& text) {
  if (text.ballot != ballot_ || is_accepting_) return;
  if (text.accepted_in > proposed_in_) {
    // It may have been decided, for all that this rank knows.
    proposed_in_ = text.accepted_in;
    proposed_ = text.changes.front();
  }
  agreeing_[from] = true;
  if (!is_quorum(agreeing_)) return;
  is_accepting_ = true;
  std::fill(agreeing_.begin(), agreeing_.end(), false);
  send_members(
      {.kind = Kind::kAccept, .number = text.number, .ballot = ballot_, .changes = {proposed_}});
}

void Council::on_accept(int from, const Text& text) {
  Text answer{.kind = Kind::kRefused, .number = text.number, .ballot = promised_};
  if (text.ballot >= promised_) {
    promised_ = accepted_in_ = text.ballot;
    accepted_ = text.changes.front();
    answer.kind = Kind::kAccepted;
    answer.ballot = text.ballot;
  }
  send(from, answer);
}

void Council::on_accepted(int from, const Text& text) {
  if (text.ballot != ballot_ || !is_accepting_) return;
  agreeing_[from] = true;
  if (!is_quorum(agreeing_)) return;
  decide(proposed_);
  send_all(own_news());
}

// The decisions that this rank has missed, if none is missing among them.
void Council::learn(const Text& text) {
  const std::uint32_t missed = text.number - number_;
  if (missed == 0 || missed > text.changes.size()) return;
  for (std::size_t i = text.changes.size() - missed; i < text.changes.size(); ++i) {
    decide(text.changes[i]);
  }
}

void Council::decide(const Change& change) {
  ++number_;
  if (change.kind == Change::Kind::kSettle) {
    // All who take part have told for this one, and so know those before. Letters stay short.
    for (Change& before : log_) before.words.clear();
  }
  log_.push_back(change);
  if (log_.size() > kRemembered) log_.pop_front();
  for (const int rank : change.ranks) {
    if (change.kind != Change::Kind::kStart) members_[rank] = change.kind == Change::Kind::kUnmask;
  }
  if (change.kind == Change::Kind::kStart) ++num_starts_;
  promised_ = accepted_in_ = ballot_ = 0;
  accepted_.reset();
  is_accepting_ = false;
  decided_(number_, change);
}

}  // namespace tandem::runtime
