#include "backend/net/remote_link.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend/net/net_door.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

using layout::Word;

// What messages without rows may have beside the words: an encoded failure, heads of runs.
constexpr std::int64_t kRoomBeside = std::int64_t{64} << 10;

// Zeros, pages of which are taken when they are used.
std::shared_ptr<std::byte> map(std::int64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  const auto size = static_cast<std::size_t>(size_bytes);
  void* const address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorCode::kResource, "no memory for " + std::to_string(size) +
                                          " bytes that go between hosts: " + std::strerror(errno));
  }
  ::madvise(address, size, MADV_HUGEPAGE);  // only a wish
  return {static_cast<std::byte*>(address), [size](std::byte* mapped) { ::munmap(mapped, size); }};
}

bool lies_in(std::int64_t offset, std::int64_t bytes, std::int64_t end) {
  return offset >= 0 && bytes >= 0 && bytes <= end && offset <= end - bytes;
}

// Of adjacent rows those from `first` on, `most` at most.
runtime::RemotePeers::Rows part_of(runtime::RemotePeers::Rows rows, std::int64_t first,
                                   std::int64_t most) {
  rows.count = std::min(most, rows.count - first);
  rows.rows += first * rows.pitch;
  rows.offset += first * rows.pitch;
  return rows;
}

std::vector<std::byte> encode(std::span<const runtime::RemotePeers::WordRun> runs) {
  std::vector<std::byte> payload;
  for (const auto& run : runs) {
    const RunHeader header{.offset = run.offset,
                           .count = static_cast<std::int64_t>(run.values.size())};
    const auto head = std::as_bytes(std::span(&header, 1));
    const auto words = std::as_bytes(run.values);
    payload.insert(payload.end(), head.begin(), head.end());
    payload.insert(payload.end(), words.begin(), words.end());
  }
  return payload;
}

}  // namespace

Inbox::Inbox(runtime::RemoteMemory memory, int size)
    : memory_(std::move(memory)),
      staging_(map(2 * memory_.staging_bytes)),
      landing_(memory_.carrier == nullptr
                   ? map(2 * memory_.landing_bytes)
                   : std::shared_ptr<std::byte>(memory_.carrier, memory_.carrier->landing())),
      peers_(static_cast<std::size_t>(size)) {}

std::optional<Receiver::Delivery> Inbox::accept(int source, std::span<const std::byte> bytes,
                                                std::size_t payload_bytes) {
  BufferHeader header;
  if (bytes.size() < sizeof header) return {};
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto length = static_cast<std::int64_t>(payload_bytes);
  const Origin origin{.source = source, .life = peers_[source].life, .sequence = header.sequence};
  const auto kind = static_cast<MessageKind>(header.kind);
  if (kind != MessageKind::kToBlock && kind != MessageKind::kToLanding) {
    // The sender says how long it is: memory for it is not taken on trust.
    if (length > kRoomBeside + 2 * memory_.control_bytes) return {};
    const auto payload = std::make_shared<std::vector<std::byte>>(payload_bytes);
    if (kind == MessageKind::kNote) {
      return Delivery{.where = payload->data(),
                      .done = [self = shared_from_this(), origin, payload] {
                        if (self->peers_[origin.source].life != origin.life) return;
                        self->take_note(origin.source, *payload);
                        self->memory_.wake();
                      }};
    }
    return Delivery{
        .where = payload->data(), .done = [self = shared_from_this(), origin, kind, payload] {
          // What waits for its turn lies in this object, and must not keep it.
          self->arrived(origin, [inbox = self.get(), source = origin.source, kind, payload] {
            inbox->take_effect(source, kind, *payload);
          });
        }};
  }
  const bool to_block = kind == MessageKind::kToBlock;
  const std::size_t source_bytes = header.num_sources * sizeof(std::int32_t);
  if (!lies_in(header.offset, length, to_block ? memory_.block_bytes : 2 * memory_.landing_bytes) ||
      !lies_in(header.sources_offset, static_cast<std::int64_t>(source_bytes),
               memory_.block_bytes) ||
      bytes.size() != sizeof header + source_bytes || (!to_block && source_bytes > 0)) {
    return {};
  }
  // A message dropped is one that has come.
  if (!peers_[source].gate.admits(header.epoch)) {
    arrived(origin, {});
    return {};
  }
  runtime::Carrier* const carrier = memory_.carrier.get();
  std::byte* where = nullptr;
  std::function<void()> effect;
  if (!to_block) {
    where = landing_.get() + header.offset;
    if (carrier != nullptr) {
      effect = [carrier, offset = header.offset, length] {
        carrier->carry_to_landing(offset, length);
      };
    }
  } else {
    if (carrier == nullptr) return {};
    const auto sources_bytes = static_cast<std::int64_t>(source_bytes);
    where = carrier->room(source, header.epoch, length + sources_bytes);
    if (where == nullptr) return {};
    if (source_bytes > 0) std::memcpy(where + length, bytes.data() + sizeof header, source_bytes);
    effect = [carrier, rows = runtime::Carrier::Rows{.room = where,
                                                     .size_bytes = length,
                                                     .offset = header.offset,
                                                     .sources_bytes = sources_bytes,
                                                     .sources_offset = header.sources_offset}] {
      carrier->carry_to_block(rows);
    };
  }
  if (effect) {
    // The gate may have been closed since: nothing of what is here is carried any more.
    effect = [&gate = peers_[source].gate, epoch = header.epoch, carry = std::move(effect)] {
      if (gate.admits(epoch)) carry();
    };
  }
  // Until the message is there, or never will be.
  std::atomic<std::int64_t>& num_receiving = peers_[source].num_receiving;
  num_receiving.fetch_add(1, std::memory_order_relaxed);
  // Pairs with the acquire in is_receiving.
  const std::shared_ptr<void> receiving(
      nullptr, [self = shared_from_this(), &num_receiving](void*) {
        if (num_receiving.fetch_sub(1, std::memory_order_release) == 1) self->memory_.wake();
      });
  return Delivery{.where = where,
                  .done = [self = shared_from_this(), origin, effect = std::move(effect),
                           receiving]() mutable { self->arrived(origin, std::move(effect)); }};
}

void Inbox::arrived(const Origin& origin, std::function<void()> effect) {
  Peer& peer = peers_[origin.source];
  if (origin.life != peer.life) return;  // of a process that has been replaced since
  peer.waiting.emplace(origin.sequence, std::move(effect));
  bool stored = false;
  for (auto first = peer.waiting.begin(); first != peer.waiting.end() && first->first == peer.next;
       first = peer.waiting.erase(first), ++peer.next) {
    if (!first->second) continue;
    first->second();
    stored = true;
  }
  if (stored) memory_.wake();
}

void Inbox::take_effect(int source, MessageKind kind, std::span<const std::byte> payload) {
  switch (kind) {
    case MessageKind::kWords:
      store(source, payload);
      return;
    case MessageKind::kFailure:
      if (!peers_[source].is_heeded.load(std::memory_order_relaxed)) return;
      take_failure(payload);
      return;
    case MessageKind::kRecover:
      if (!peers_[source].is_heeded.load(std::memory_order_relaxed)) return;
      come_to_recover(source, payload);
      return;
    case MessageKind::kLeft:
      lose(source);
      return;
    case MessageKind::kNoteInOrder:
      take_note(source, payload);
      return;
    default:
      return;
  }
}

void Inbox::take_note(int source, std::span<const std::byte> text) {
  if (take_text_) take_text_(source, text);
}

// Of several failures since a new start the first one counts.
void Inbox::fail(std::uint32_t start, runtime::Failure failure) {
  if (failed_since(start)) return;
  failure_ = std::move(failure);
  failed_after_.store(start + 1, std::memory_order_release);  // pairs with failed_since
}

void Inbox::take_failure(std::span<const std::byte> payload) {
  std::uint32_t start = 0;
  if (payload.size() < sizeof start) return;
  std::memcpy(&start, payload.data(), sizeof start);
  if (auto failure = runtime::decode_failure(payload.subspan(sizeof start))) {
    fail(start, std::move(*failure));
  }
}

void Inbox::come_to_recover(int source, std::span<const std::byte> payload) {
  Word word;
  if (payload.size() != sizeof word) return;
  std::memcpy(&word, payload.data(), sizeof word);
  const std::uint32_t start = layout::epoch_of(word);
  Peer& peer = peers_[source];
  if (start == 0) return;
  // After all that the peer sent before. Pairs with the acquire in has_come.
  peer.starts[start % 2].store(word, std::memory_order_release);
  fail(start - 1, {.info = {.code = ErrorCode::kFailedBuffer, .peer = source},
                   .message = "rank " + std::to_string(source) + " has called recover()"});
}

std::optional<layout::Epoch> Inbox::has_come(int peer, std::uint32_t start) const {
  const Word word = peers_[peer].starts[start % 2].load(std::memory_order_acquire);
  if (layout::epoch_of(word) != start) return {};
  return layout::value_of(word);
}

void Inbox::store(int source, std::span<const std::byte> runs) {
  while (runs.size() >= sizeof(RunHeader)) {
    RunHeader run;
    std::memcpy(&run, runs.data(), sizeof run);
    runs = runs.subspan(sizeof run);
    // Before it is multiplied: the product of any count may be any number.
    if (run.count < 0 || static_cast<std::size_t>(run.count) > runs.size() / sizeof(Word)) return;
    const std::int64_t bytes = run.count * static_cast<std::int64_t>(sizeof(Word));
    if (!lies_in(run.offset, bytes, memory_.control_bytes) || run.offset % alignof(Word) != 0) {
      return;
    }
    const auto* const words = reinterpret_cast<const Word*>(runs.data());
    if (run.count > 0 && !peers_[source].gate.admits(layout::epoch_of(words[0]))) {
      // of a rank that is masked, or from before it was
    } else if (memory_.carrier != nullptr) {
      memory_.carrier->carry_words(source, run.offset,
                                   {words, static_cast<std::size_t>(run.count)});
    } else {
      auto* const to = reinterpret_cast<Word*>(memory_.block.get() + run.offset);
      for (std::int64_t i = 0; i < run.count; ++i) {
        // In the order sent, so that the last is released after all before it, and after the rows.
        // Pairs with the acquires of the buffer's waits.
        std::atomic_ref<Word>(to[i]).store(words[i], std::memory_order_release);
      }
    }
    runs = runs.subspan(static_cast<std::size_t>(bytes));
  }
}

void Inbox::peer_lost(int peer) {
  lose(peer);
  memory_.wake();
}

void Inbox::lose(int peer) {
  // After the words that came before. Pairs with the acquire in is_lost.
  peers_[peer].lost.store(true, std::memory_order_release);
  if (memory_.carrier != nullptr) memory_.carrier->lost(peer);
}

bool Inbox::let_come(int peer, bool was_there) {
  Peer& before = peers_[peer];
  if (!is_lost(peer) || is_receiving(peer) || !let_come_ || !let_come_(peer, was_there))
    return false;
  ++before.life;
  before.next = before.num_sent = 0;
  before.waiting.clear();
  for (auto& start : before.starts) start.store(0, std::memory_order_relaxed);
  before.lost.store(false, std::memory_order_release);
  memory_.wake();
  return true;
}

RemoteLink::RemoteLink(std::shared_ptr<Connections> connections, std::uint32_t channel, int size,
                       runtime::RemoteMemory memory, std::string secret)
    : connections_(std::move(connections)),
      channel_(channel),
      inbox_(std::make_shared<Inbox>(std::move(memory), size)),
      secret_(std::move(secret)) {
  connections_->attach(channel_, inbox_);
}

RemoteLink::~RemoteLink() {
  connections_->detach(channel_);
  for (int peer = 0; peer < inbox_->size(); ++peer) {
    send_bytes(peer, MessageKind::kLeft, {});
  }
}

void RemoteLink::send_to_block(int peer, const Rows& rows, std::span<const std::int32_t> sources,
                               std::int64_t sources_offset) {
  // As many rows a message as their source tokens fit into its header.
  const auto room = static_cast<std::int64_t>(
      (connections_->max_header_bytes() - sizeof(BufferHeader)) / sizeof(std::int32_t));
  for (std::int64_t first = 0; first < rows.count; first += room) {
    const Rows part = part_of(rows, first, room);
    send_rows(
        peer, part, MessageKind::kToBlock,
        sources.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(part.count)),
        sources_offset + first * static_cast<std::int64_t>(sizeof(std::int32_t)));
  }
}

void RemoteLink::send_to_landing(int peer, const Rows& rows) {
  Rows placed = rows;
  placed.offset += layout::parity(rows.epoch) * inbox_->memory().landing_bytes;
  const std::int64_t room = rows.in_pieces
                                ? std::max<std::int64_t>(Connections::kShortBytes / rows.pitch, 1)
                                : rows.count;
  for (std::int64_t first = 0; first < rows.count; first += room) {
    send_rows(peer, part_of(placed, first, room), MessageKind::kToLanding, {}, 0);
  }
}

void RemoteLink::send_rows(int peer, const Rows& rows, MessageKind kind,
                           std::span<const std::int32_t> sources, std::int64_t sources_offset) {
  const std::lock_guard lock(connections_->mutex());
  if (!connections_->has_met(peer)) return;
  const BufferHeader header{.sequence = inbox_->next_to(peer),
                            .kind = static_cast<std::uint32_t>(kind),
                            .num_sources = static_cast<std::uint32_t>(sources.size()),
                            .offset = rows.offset,
                            .sources_offset = sources_offset,
                            .epoch = rows.epoch,
                            .zero = 0};
  std::vector<std::byte> bytes(sizeof header + sources.size_bytes());
  std::memcpy(bytes.data(), &header, sizeof header);
  if (!sources.empty()) {
    std::memcpy(bytes.data() + sizeof header, sources.data(), sources.size_bytes());
  }
  std::atomic<std::int64_t>& leaving = inbox_->num_leaving(peer, layout::parity(rows.epoch));
  leaving.fetch_add(1, std::memory_order_relaxed);
  Connections::Message message{
      .channel = channel_,
      .header = std::move(bytes),
      .payload = {rows.rows, static_cast<std::size_t>(rows.count * rows.pitch)},
      .keep = inbox_,
      // The reads are over before whoever sees it writes. Pairs with the acquire in has_left.
      .left = [inbox = inbox_, &leaving] {
        if (leaving.fetch_sub(1, std::memory_order_release) == 1) inbox->memory().wake();
      }};
  connections_->send_with_next(peer, std::move(message));  // words follow all rows
}

void RemoteLink::send_words(int peer, std::span<const WordRun> runs) {
  send_bytes(peer, MessageKind::kWords, encode(runs));
}

void RemoteLink::send_words_with_next(int peer, std::span<const WordRun> runs) {
  std::vector<std::byte> words = encode(runs);
  const std::lock_guard lock(connections_->mutex());
  if (!connections_->has_met(peer)) return;
  connections_->send_with_next(
      peer, message(channel_, inbox_->next_to(peer), MessageKind::kWords, std::move(words)));
}

void RemoteLink::come_to_recover(layout::Epoch next, const std::optional<runtime::Failure>& cause) {
  if (num_comings_ > num_starts_) return;
  if (cause) send_failure(*cause);
  const Word word = layout::make_word(num_comings_ + 1, next);
  const auto bytes = std::as_bytes(std::span(&word, 1));
  for (int peer = 0; peer < inbox_->size(); ++peer) {
    send_bytes(peer, MessageKind::kRecover, {bytes.begin(), bytes.end()});
  }
  ++num_comings_;
}

void RemoteLink::send_failure(const runtime::Failure& failure) {
  // A process that has joined does not know by itself to which new start a peer has come.
  const std::uint32_t start = num_comings_;
  const auto head = std::as_bytes(std::span(&start, 1));
  std::vector<std::byte> payload(head.begin(), head.end());
  const std::vector<std::byte> encoded = runtime::encode(failure);
  payload.insert(payload.end(), encoded.begin(), encoded.end());
  for (int peer = 0; peer < inbox_->size(); ++peer) {
    send_bytes(peer, MessageKind::kFailure, payload);
  }
}

runtime::Failure RemoteLink::failure() const {
  const std::lock_guard lock(connections_->mutex());
  return *inbox_->failure();
}

void RemoteLink::send_note(Note note) {
  const std::lock_guard lock(connections_->mutex());
  connections_->send(note.to, message(channel_, 0, MessageKind::kNote, std::move(note.text)));
}

void RemoteLink::listen(TakeNote take, LetCome let_come) {
  const std::lock_guard lock(connections_->mutex());
  if (!take) return inbox_->listen({}, {});
  inbox_->listen(
      [connections = connections_.get(), channel = channel_, take = std::move(take)](
          int source, std::span<const std::byte> text) {
        for (Note& note : take(source, text)) {
          connections->answer(note.to,
                              message(channel, 0, MessageKind::kNote, std::move(note.text)));
        }
      },
      std::move(let_come));
}

std::shared_ptr<void> RemoteLink::open_door(int rank, const std::string& address,
                                            Describe describe) {
  const std::string who = "rank " + std::to_string(rank);
  if (secret_.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                who +
                    " has a door_address, but its communicator has no secret: whoever reaches the "
                    "address could join");
  }
  if (!connections_->door().expired()) {
    throw Error(ErrorCode::kUnsupported,
                "a communicator across hosts has one buffer that processes may join; another needs "
                "a communicator of its own");
  }
  const auto door = std::make_shared<NetDoor>(
      address, secret_, who,
      [this, rank, describe = std::move(describe)](int visitor) -> std::vector<std::byte> {
        const bool may_be = visitor >= 0 && visitor < inbox_->size();
        if (visitor == rank || (may_be && !inbox_->is_lost(visitor))) {
          throw Error(ErrorInfo{.code = ErrorCode::kOrder, .phase = Phase::kSetup, .peer = visitor},
                      "rank " + std::to_string(visitor) +
                          " is there already: another process is that rank");
        }
        return encode(Invitation{
            .channel = channel_, .book = connections_->book(), .situation = describe(visitor)});
      });
  connections_->door() = door;
  return door;
}

void RemoteLink::shut(int peer) {
  const std::lock_guard lock(connections_->mutex());
  inbox_->shut(peer);
}

void RemoteLink::admit(int peer, std::optional<layout::Epoch> from) {
  const std::lock_guard lock(connections_->mutex());
  inbox_->admit(peer, from);
}

Connections::Message RemoteLink::message(std::uint32_t channel, std::uint64_t sequence,
                                         MessageKind kind, std::vector<std::byte> bytes) {
  const auto payload = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  const BufferHeader header{.sequence = sequence,
                            .kind = static_cast<std::uint32_t>(kind),
                            .num_sources = 0,
                            .offset = 0,
                            .sources_offset = 0,
                            .epoch = 0,
                            .zero = 0};
  const auto head = std::as_bytes(std::span(&header, 1));
  return {.channel = channel,
          .header = {head.begin(), head.end()},
          .payload = *payload,
          .keep = payload,
          .left = {}};
}

bool RemoteLink::has_left(int peer, int parity) const {
  return inbox_->num_leaving(peer, parity).load(std::memory_order_acquire) == 0;
}

std::optional<std::string> RemoteLink::lost(int peer) const {
  if (!inbox_->is_lost(peer)) return {};
  const std::lock_guard lock(connections_->mutex());
  return connections_->lost(peer).value_or("has destroyed its buffer");
}

}  // namespace tandem::net
