// One buffer's way to the ranks on other hosts (runtime/network.h): rows and control words as
// messages, and what peers send put into this rank's memory in the order it was sent.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/net/connections.h"
#include "layout/control_word.h"
#include "runtime/network.h"

namespace tandem::net {

// What a message of a buffer says behind its envelope. Source tokens follow the header of rows.
struct BufferHeader {
  std::uint64_t sequence;  // of this sender's messages to this receiver
  std::uint32_t kind;      // MessageKind
  std::uint32_t num_sources;
  std::int64_t offset;          // rows: of the block or the landing memory
  std::int64_t sources_offset;  // of the block
  std::uint32_t epoch;          // rows: of the operation
  std::uint32_t zero;
};
enum class MessageKind : std::uint32_t {
  kWords = 0,
  kToBlock = 1,  // for a carrier
  kToLanding = 2,
  kFailure = 3,      // the number of the new start it comes behind (0: none); an encoded Failure
  kLeft = 4,         // the sender has destroyed its buffer
  kRecover = 5,      // a Word: the number of the new start it has come to, its next epoch
  kNote = 6,         // for whoever listens, at once: the sequence means nothing
  kNoteInOrder = 7,  // the same, in order
};

// Runs of words in the payload of a message: this, then the words.
struct RunHeader {
  std::int64_t offset;
  std::int64_t count;
};

// The receiving end. It owns the memory that messages are read from and written to, so that none is
// left dangling by a buffer that goes while they are under way.
class Inbox final : public Receiver, public std::enable_shared_from_this<Inbox> {
 public:
  Inbox(runtime::RemoteMemory memory, int size);

  std::optional<Delivery> accept(int source, std::span<const std::byte> header,
                                 std::size_t payload_bytes) override;
  void peer_lost(int peer) override;
  bool let_come(int peer, bool was_there) override;

  [[nodiscard]] int size() const { return static_cast<int>(peers_.size()); }
  [[nodiscard]] const runtime::RemoteMemory& memory() const { return memory_; }
  [[nodiscard]] std::byte* staging(int parity) const {
    return staging_.get() + parity * memory_.staging_bytes;
  }
  [[nodiscard]] std::byte* landing(int parity) const {
    return landing_.get() + parity * memory_.landing_bytes;
  }
  [[nodiscard]] bool is_lost(int peer) const {
    return peers_[peer].lost.load(std::memory_order_acquire);
  }

  // Have operations failed, or has a peer come to recover, since new start number `start` was made?
  [[nodiscard]] bool failed_since(std::uint32_t start) const {
    return failed_after_.load(std::memory_order_acquire) > start;
  }
  // The first failure since the last new start. Under the connections' mutex.
  [[nodiscard]] const std::optional<runtime::Failure>& failure() const { return failure_; }
  void forgive() { failed_after_.store(0, std::memory_order_release); }
  // The epoch that `peer` would go on with, if it has come to that new start.
  [[nodiscard]] std::optional<layout::Epoch> has_come(int peer, std::uint32_t start) const;

  // Rows on their way to `peer`, by parity of the epoch. Counted up by the caller, down by whoever
  // drives the connections.
  [[nodiscard]] std::atomic<std::int64_t>& num_leaving(int peer, int parity) {
    return peers_[peer].num_leaving[parity];
  }

  // Under the connections' mutex: the number of the next message to `peer`.
  [[nodiscard]] std::uint64_t next_to(int peer) { return peers_[peer].num_sent++; }

  // As RemotePeers' of these names; those in the second line under the connections' mutex.
  void heed(int peer, bool is_heeded) {
    peers_[peer].is_heeded.store(is_heeded, std::memory_order_relaxed);
  }
  void shut(int peer) { peers_[peer].gate = Gate{.is_shut = true}; }
  void admit(int peer, std::optional<layout::Epoch> from) {
    peers_[peer].gate = Gate{.from = from};
  }
  [[nodiscard]] bool is_receiving(int peer) const {
    return peers_[peer].num_receiving.load(std::memory_order_acquire) > 0;
  }
  // Under the connections' mutex, which also whoever listens is called with.
  using TakeText = std::function<void(int source, std::span<const std::byte> text)>;
  void listen(TakeText take, runtime::RemotePeers::LetCome let_come) {
    take_text_ = std::move(take);
    let_come_ = std::move(let_come);
  }

 private:
  // Which operations' rows and words are taken.
  struct Gate {
    bool is_shut = false;
    std::optional<layout::Epoch> from = {};
    [[nodiscard]] bool admits(layout::Epoch epoch) const {
      return !is_shut && (!from || layout::has_reached(epoch, *from));
    }
  };
  struct Peer {
    Gate gate;
    std::atomic<bool> is_heeded = true;
    std::atomic<std::int64_t> num_receiving = 0;  // rows into this rank's memory
    std::uint32_t life = 0;                       // how many processes have been it before
    std::uint64_t next = 0;                       // the first message that has not taken effect
    std::map<std::uint64_t, std::function<void()>> waiting;  // of later ones that are here
    std::atomic<bool> lost = false;
    // The new starts it has come to last, by parity: it is never two ahead of this rank.
    std::atomic<layout::Word> starts[2] = {0, 0};
    std::atomic<std::int64_t> num_leaving[2] = {0, 0};
    std::uint64_t num_sent = 0;  // to this peer
  };

  // Which message of which peer.
  struct Origin {
    int source = 0;
    std::uint32_t life = 0;  // of the process that was that peer then
    std::uint64_t sequence = 0;
  };
  // It is here; what it and its successors do is done in their order.
  void arrived(const Origin& origin, std::function<void()> effect);
  void take_effect(int source, MessageKind kind, std::span<const std::byte> payload);
  void take_note(int source, std::span<const std::byte> text);
  void fail(std::uint32_t start, runtime::Failure failure);
  void take_failure(std::span<const std::byte> payload);
  void come_to_recover(int source, std::span<const std::byte> payload);
  void store(int source, std::span<const std::byte> runs);
  void lose(int peer);

  runtime::RemoteMemory memory_;
  TakeText take_text_;
  runtime::RemotePeers::LetCome let_come_;
  std::shared_ptr<std::byte> staging_;
  std::shared_ptr<std::byte> landing_;
  std::vector<Peer> peers_;
  std::optional<runtime::Failure> failure_;
  // One more than the number of the new start behind which operations have failed last; 0: never.
  std::atomic<std::uint32_t> failed_after_ = 0;
};

class RemoteLink final : public runtime::RemotePeers {
 public:
  // `secret`: of those who may knock at a door; empty where there can be none.
  RemoteLink(std::shared_ptr<Connections> connections, std::uint32_t channel, int size,
             runtime::RemoteMemory memory, std::string secret);
  ~RemoteLink() override;

  [[nodiscard]] std::byte* staging(int parity) override { return inbox_->staging(parity); }
  [[nodiscard]] std::byte* landing(int parity) override { return inbox_->landing(parity); }
  void send_to_block(int peer, const Rows& rows, std::span<const std::int32_t> sources,
                     std::int64_t sources_offset) override;
  void send_to_landing(int peer, const Rows& rows) override;
  void send_words(int peer, std::span<const WordRun> runs) override;
  void send_words_with_next(int peer, std::span<const WordRun> runs) override;
  [[nodiscard]] bool has_left(int peer, int parity) const override;
  [[nodiscard]] std::optional<std::string> lost(int peer) const override;
  void send_failure(const runtime::Failure& failure) override;
  [[nodiscard]] bool failed() const override { return inbox_->failed_since(num_starts_); }
  [[nodiscard]] runtime::Failure failure() const override;
  void come_to_recover(layout::Epoch next, const std::optional<runtime::Failure>& cause) override;
  [[nodiscard]] std::optional<layout::Epoch> has_come_to_recover(int peer) const override {
    return inbox_->has_come(peer, num_starts_ + 1);
  }
  void recovered(std::uint32_t num_starts) override { num_starts_ = num_comings_ = num_starts; }
  void forgive() override { inbox_->forgive(); }
  void send_note(Note note) override;
  void send_note_in_order(Note note) override {
    send_bytes(note.to, MessageKind::kNoteInOrder, std::move(note.text));
  }
  void listen(TakeNote take, LetCome let_come) override;
  void heed(int peer, bool is_heeded) override { inbox_->heed(peer, is_heeded); }
  void shut(int peer) override;
  void admit(int peer, std::optional<layout::Epoch> from) override;
  [[nodiscard]] bool is_receiving(int peer) const override { return inbox_->is_receiving(peer); }
  [[nodiscard]] std::shared_ptr<void> open_door(int rank, const std::string& address,
                                                Describe describe) override;
  void say_hello(int peer) override { connections_->say_hello(peer, channel_); }
  [[nodiscard]] bool has_met(int peer) const override {
    const std::lock_guard lock(connections_->mutex());
    return connections_->has_met(peer);
  }
  void progress() override { connections_->progress(); }
  void rest() override { connections_->rest(); }
  void leave() override { connections_->leave(); }

 private:
  [[nodiscard]] static Connections::Message message(std::uint32_t channel, std::uint64_t sequence,
                                                    MessageKind kind,
                                                    std::vector<std::byte> payload);
  void send_bytes(int peer, MessageKind kind, std::vector<std::byte> payload) {
    const std::lock_guard lock(connections_->mutex());
    if (!connections_->has_met(peer)) return;  // and no number is missing later
    connections_->send(peer, message(channel_, inbox_->next_to(peer), kind, std::move(payload)));
  }
  void send_rows(int peer, const Rows& rows, MessageKind kind,
                 std::span<const std::int32_t> sources, std::int64_t sources_offset);

  std::shared_ptr<Connections> connections_;
  std::uint32_t channel_;
  std::shared_ptr<Inbox> inbox_;
  std::string secret_;
  std::atomic<std::uint32_t> num_starts_ = 0;  // made after failures
  // To new starts: that many, or one more. A carrier's thread looks, whose failures are of before.
  std::atomic<std::uint32_t> num_comings_ = 0;
};

}  // namespace tandem::net
