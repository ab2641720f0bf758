// What the library asks of a network between hosts, for those who know none: src/backend/net
// implements it, registry.cc names it. Ranks on one host go on sharing memory; a buffer sends to
// the others what it would store into their blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout/control_word.h"
#include "runtime/bootstrap.h"
#include "runtime/failure.h"
#include "tandem/communicator.h"
#include "tandem/info.h"

namespace tandem::runtime {

// One buffer's way to the ranks on other hosts. What is sent to a peer takes effect there in the
// order of the calls: words are stored once everything sent before them has arrived.
//
// Thread safety: one caller at a time, as a buffer, but for what is sent, which a thread of the
// buffer's own may do besides; what peers send is taken in at any time, by a thread that sleeps
// when nothing comes.
class RemotePeers {
 public:
  virtual ~RemotePeers() = default;

  // This rank's memory for rows on their way out, and for what peers send to it; each by the parity
  // of the operation's epoch.
  [[nodiscard]] virtual std::byte* staging(int parity) = 0;
  [[nodiscard]] virtual std::byte* landing(int parity) = 0;

  // Adjacent rows and where they go: to an offset of the peer's landing memory, or, if it has a
  // carrier, of its block, beside their source tokens. `rows` is read until has_left says
  // otherwise.
  struct Rows {
    const std::byte* rows = nullptr;
    std::int64_t count = 0;
    std::int64_t pitch = 0;
    std::int64_t offset = 0;
    layout::Epoch epoch = 0;
    // In short pieces, which are copied on their way but need no answer of the peer's, whose answer
    // would wait behind what it sends itself.
    bool in_pieces = false;
  };
  virtual void send_to_block(int peer, const Rows& rows, std::span<const std::int32_t> sources,
                             std::int64_t sources_offset) = 0;
  virtual void send_to_landing(int peer, const Rows& rows) = 0;

  // Stores `values` from `offset` of the peer's block on; copies them. The last word is released
  // after all before it.
  struct WordRun {
    std::int64_t offset;
    std::span<const layout::Word> values;
  };
  virtual void send_words(int peer, std::span<const WordRun> runs) = 0;
  // The same for words that nobody is waiting for yet: they may leave with what is sent to the peer
  // next, within a millisecond.
  virtual void send_words_with_next(int peer, std::span<const WordRun> runs) = 0;

  // Has all that was sent to `peer` in epochs of this parity left the memory it was read from?
  [[nodiscard]] virtual bool has_left(int peer, int parity) const = 0;

  // Why nothing more will come from `peer`, once that is so and all that came before has taken
  // effect.
  [[nodiscard]] virtual std::optional<std::string> lost(int peer) const = 0;

  // Tells all peers on other hosts that operations cannot go on; and what one of them has told.
  virtual void send_failure(const Failure& failure) = 0;
  [[nodiscard]] virtual bool failed() const = 0;
  [[nodiscard]] virtual Failure failure() const = 0;

  // A new start after a failure, in which all ranks meet. Tells the other ranks, also those of this
  // host, once, that this one has come and would go on with epoch `next`, and what has failed,
  // which they may not have heard from whoever noticed; and whether `peer` has come too: the epoch
  // that it would go on with, once all that it sent before has taken effect.
  virtual void come_to_recover(layout::Epoch next, const std::optional<Failure>& cause) = 0;
  [[nodiscard]] virtual std::optional<layout::Epoch> has_come_to_recover(int peer) const = 0;
  // So many new starts have been made: failures of before have passed. Until then failed() is also
  // true once a peer has come to recover from one that this rank has not met with.
  virtual void recovered(std::uint32_t num_starts) = 0;
  // Failures that have been told up to now concern this rank no more. By any thread.
  virtual void forgive() = 0;

  // Notes are what ranks, also those of one host, tell each other beside operations. One in order
  // takes effect once all that was sent before has; others, which any thread may send, at once.
  struct Note {
    int to = 0;
    std::vector<std::byte> text;
  };
  virtual void send_note(Note note) = 0;
  virtual void send_note_in_order(Note note) = 0;
  // `take` gets each note, from whichever thread takes in what comes; what it returns is sent, out
  // of order. Null: nobody listens, and nobody is being called any more.
  using TakeNote = std::function<std::vector<Note>(int source, std::span<const std::byte> text)>;
  // Asked, by the same thread, before a process takes the place of `peer`, from whom nothing more
  // will come. If it may, what comes from `peer` is that process's from then on, and what is sent
  // to `peer` goes there.
  // `was_there`: this process has been connected to one before it.
  using LetCome = std::function<bool(int peer, bool was_there)>;
  virtual void listen(TakeNote take, LetCome let_come) = 0;

  // Listens at `address` for processes of other hosts that are to become a rank, as long as what it
  // returns lives; `rank` is this one. They are told what `describe` returns, which is called by
  // the door's thread with the rank that one says it is to be (any number); it throws what the
  // process is refused with (kTimeout: for now). Throws kInvalidArgument, kResource.
  using Describe = std::function<std::vector<std::byte>(int rank)>;
  [[nodiscard]] virtual std::shared_ptr<void> open_door(int rank, const std::string& address,
                                                        Describe describe) = 0;
  // Of such a process: tells `peer` that it is there; it may have to be told again.
  virtual void say_hello(int peer) = 0;
  // Are `peer` and this process connected to each other? What is sent before goes nowhere.
  [[nodiscard]] virtual bool has_met(int peer) const = 0;

  // Who is believed, by any thread: of others, failures and comings to recover are dropped.
  virtual void heed(int peer, bool is_heeded) = 0;
  // What a peer sends of operations is dropped from now on, and is taken again from epoch `from`
  // on, or any. Rows that have begun to come go on coming while is_receiving.
  virtual void shut(int peer) = 0;
  virtual void admit(int peer, std::optional<layout::Epoch> from) = 0;
  [[nodiscard]] virtual bool is_receiving(int peer) const = 0;

  // Takes in what has come, if no other thread is about to. For a caller that waits, and calls it
  // again and again: as long as it does, it is left to it.
  virtual void progress() = 0;
  // That caller is about to sleep, until it is woken.
  virtual void rest() = 0;
  // It turns to something else: what it has sent shall leave without it.
  virtual void leave() = 0;
};

// Brings what peers have sent to where it takes effect, for a buffer whose memory the network
// cannot write: a GPU's. It lands in memory of the carrier's own and goes on from there. (Where the
// network can, a buffer of GPU memory needs none.)
//
// Thread safety: called by one thread at a time, whichever takes in what comes. Must not throw, nor
// wait for a peer.
class Carrier {
 public:
  virtual ~Carrier() = default;

  // Where `size_bytes` are to land: rows that `source` sent in `epoch`, and their source tokens
  // behind them. Null: that is more than a rank can send in one operation.
  [[nodiscard]] virtual std::byte* room(int source, layout::Epoch epoch,
                                        std::int64_t size_bytes) = 0;
  // Where expert outputs land: twice RemoteMemory::landing_bytes.
  [[nodiscard]] virtual std::byte* landing() = 0;

  // The following come in the order in which they are to take effect.
  struct Rows {
    const std::byte* room = nullptr;
    std::int64_t size_bytes = 0;
    std::int64_t offset = 0;  // of the block
    std::int64_t sources_bytes = 0;
    std::int64_t sources_offset = 0;
  };
  virtual void carry_to_block(const Rows& rows) = 0;
  virtual void carry_to_landing(std::int64_t offset, std::int64_t size_bytes) = 0;
  virtual void carry_words(int source, std::int64_t offset,
                           std::span<const layout::Word> words) = 0;
  // Nothing more will come from `peer`.
  virtual void lost(int peer) = 0;
};

// The memory that a buffer gives to its peers on other hosts.
struct RemoteMemory {
  std::shared_ptr<std::byte> block;  // null with a carrier
  std::int64_t block_bytes = 0;
  std::int64_t control_bytes = 0;  // peers' words lie before this offset
  std::int64_t staging_bytes = 0;  // per parity
  std::int64_t landing_bytes = 0;
  std::function<void()> wake;  // called after words have been stored, or a peer is lost or comes
  std::shared_ptr<Carrier> carrier = {};
  int num_ranks = 0;  // that there may be, if more than the communicator has
};

// The network of a communicator some of whose ranks are on other hosts.
class Network {
 public:
  virtual ~Network() = default;
  // Collective over the communicator, in the same order on all ranks. Nothing may be sent before
  // all ranks have returned (a barrier).
  [[nodiscard]] virtual std::unique_ptr<RemotePeers> open(RemoteMemory memory) = 0;
};

// A communicator to be made.
struct Party {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::vector<int> host_ranks;  // on this rank's host, ascending
  std::string host_name;        // a name for them to meet under
  std::string secret;           // of those who may join a buffer of it later; may be empty
};

// What a process gets that asks to become a rank of a buffer whose ranks are on several hosts.
struct Invitation {
  std::vector<std::byte> situation;  // as RemotePeers::Describe gave it; it may say anything
  std::shared_ptr<Network> network;  // for one buffer, to be opened with its num_ranks
};

// What a build with a network can do.
class NetworkInterface {
 public:
  virtual ~NetworkInterface() = default;

  [[nodiscard]] virtual NetworkInfo info() const = 0;

  // A gathering function over a listener of rank 0 at `address` ("host:port"), for ranks that know
  // `secret`. Throws as Communicator::connect_across_hosts documents.
  [[nodiscard]] virtual Communicator::AllGather meet(const std::string& address,
                                                     const std::string& secret, int rank, int size,
                                                     std::chrono::milliseconds timeout) const = 0;

  // Collective; calls `all_gather` once.
  [[nodiscard]] virtual std::shared_ptr<Bootstrap> join(
      const Party& party, const Communicator::AllGather& all_gather) const = 0;

  // Asks at a door (RemotePeers::open_door) to become `rank`. Throws as Buffer::join_across_hosts
  // documents.
  [[nodiscard]] virtual Invitation visit(const std::string& address, const std::string& secret,
                                         int rank, std::chrono::milliseconds timeout) const = 0;
};

// Null where this build has no network.
const NetworkInterface* network();

}  // namespace tandem::runtime
