// One rank's connections to the ranks on other hosts: a UCX worker with its thread, and an endpoint
// per peer. Messages are active messages of UCX; which part of the library one is for, its channel
// says. docs/network.md has the why.
//
// Thread safety: all of it, by one mutex that is also held while receivers are called.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/net/driven_worker.h"
#include "backend/net/invitation.h"

namespace tandem::net {

// Begins the header of every message; what the channel puts behind it follows.
struct Envelope {
  std::uint64_t token;  // of the process that sends: nobody else's message is looked at
  std::uint32_t source;
  std::uint32_t channel;
};

// Who takes in the messages of a channel. Called with the connections' mutex held; sends by
// Connections::answer only.
class Receiver {
 public:
  virtual ~Receiver() = default;
  struct Delivery {
    std::byte* where = nullptr;  // for the payload
    std::function<void()> done;  // once it is there
  };
  // Nothing: the message makes no sense here and is dropped.
  virtual std::optional<Delivery> accept(int source, std::span<const std::byte> header,
                                         std::size_t payload_bytes) = 0;
  // Nothing more will come from `peer`.
  virtual void peer_lost(int peer) = 0;
  // Another process is to be `peer`. May it? Not while anything may come of the one before, if
  // there was one that this process has been connected to. If so, what is known of it is forgotten.
  virtual bool let_come([[maybe_unused]] int peer, [[maybe_unused]] bool was_there) {
    return false;
  }
};

// Of a process: nobody guesses it. Throws kResource.
std::uint64_t random_token();

class Connections {
 public:
  // Above this a message goes alone, by rendezvous if UCX sees fit: without a copy, but only once
  // the receiver has answered.
  static constexpr std::size_t kShortBytes = std::size_t{128} << 10;

  Connections(int rank, int size);
  // Says goodbye: waits, briefly, until peers have got what was sent to them.
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  [[nodiscard]] std::vector<std::byte> address() const { return worker_.ucx().address(); }
  // Before anything is taken in: what the messages of this process carry.
  void start(std::uint64_t token);
  // One that connects to this process as well.
  void connect(const Acquaintance& who);
  // One that does so once it has heard of this process; it may be gone by now.
  void turn_to(const Acquaintance& who);
  // For ranks beyond those of the communicator, which have never been there.
  void make_room(int size);

  // The door that is open, if one is: processes that come in are a rank for one buffer only.
  [[nodiscard]] std::weak_ptr<void>& door() { return door_; }

  // --- processes that come later (docs/failures.md, "Across hosts") ---
  // This process and those that it is connected to.
  [[nodiscard]] AddressBook book();
  // Of such a process: tells `peer` who it is, and on which channel, so that that one connects to
  // it. It answers with those whom it knows, to whom this process says hello too.
  void say_hello(int peer, std::uint32_t channel);
  // Is `peer` connected to this process too, as far as it has said? Before that nothing but hellos
  // is to be sent to it. With the mutex held.
  [[nodiscard]] bool has_met(int peer) const { return peers_[peer].has_met && !peers_[peer].lost; }

  // The room behind the envelope in a message's header.
  [[nodiscard]] std::size_t max_header_bytes() const { return max_header_bytes_; }

  void attach(std::uint32_t channel, std::shared_ptr<Receiver> receiver);
  void detach(std::uint32_t channel);

  struct Message {
    std::uint32_t channel = 0;
    std::vector<std::byte> header;
    std::span<const std::byte> payload;
    std::shared_ptr<const void> keep;  // what holds the payload's memory
    std::function<void()> left;        // called, mutex held, once the payload has been read
  };
  // With the mutex held, as send_with_next. Never waits. What is sent to a peer that is lost goes
  // nowhere.
  void send(int peer, Message message);
  // For a receiver that is being called, and so holds the mutex: the message leaves once UCX is
  // done calling. (UCX 1.13 ends the process if a connection turns out to be broken while it looks
  // at what has come over it.)
  void answer(int peer, Message message);
  // As send, but a short message, which is copied on its way in any case, waits for the next one
  // to this peer, and leaves with it, or after a moment.
  void send_with_next(int peer, Message message);

  // As RemotePeers' of these names.
  void progress();
  void rest();
  void leave();

  // Why nothing more will come from `peer`; the caller holds the mutex, or has been told.
  [[nodiscard]] const std::optional<std::string>& lost(int peer) const { return peers_[peer].lost; }

  // For those who wait for what receivers change.
  [[nodiscard]] std::mutex& mutex() { return worker_.mutex(); }
  void wait(std::unique_lock<std::mutex>& lock, const runtime::Deadline& deadline) {
    worker_.wait(lock, deadline);
  }

 private:
  // Another process that is to be a peer: until the one before is done with, it waits.
  struct Coming {
    Acquaintance who;
    std::uint32_t channel = 0;
    bool has_said_hello = false;  // and is to be answered; else it is to hear it
  };
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    std::optional<std::uint64_t> token;
    std::vector<std::byte> address;
    std::optional<std::string> lost = "is not there";
    bool has_met = false;
    std::optional<Coming> coming;
    bool has_all = false;       // it has answered this rank's goodbye
    bool leaves = false;        // its own goodbye is to be answered
    std::vector<Message> held;  // to leave with the next
    std::size_t held_bytes = 0;
  };
  struct Sending;
  struct Receiving;

  // The active messages of a worker.
  enum MessageId : unsigned {
    kMessage = 0,
    kFarewell = 1,
    kBatch = 2,  // several messages; the envelope's channel means nothing
    kHello = 3,  // of a process that comes later, or an answer to it
  };

  static ucs_status_t on_message(void* self, const void* header, std::size_t header_bytes,
                                 void* data, std::size_t data_bytes,
                                 const ucp_am_recv_param_t* param);
  static ucs_status_t on_batch(void* self, const void* header, std::size_t header_bytes, void* data,
                               std::size_t data_bytes, const ucp_am_recv_param_t* param);
  static ucs_status_t on_farewell(void* self, const void* header, std::size_t header_bytes,
                                  void* data, std::size_t data_bytes,
                                  const ucp_am_recv_param_t* param);
  static ucs_status_t on_hello(void* self, const void* header, std::size_t header_bytes, void* data,
                               std::size_t data_bytes, const ucp_am_recv_param_t* param);
  static void on_error(void* self, ucp_ep_h endpoint, ucs_status_t status);

  [[nodiscard]] std::optional<Envelope> open(const void* header, std::size_t header_bytes) const;
  [[nodiscard]] std::vector<std::byte> seal(std::uint32_t channel,
                                            std::span<const std::byte> header) const;
  void post_held(int peer);
  void post_all_held();
  void post(int peer, MessageId message, std::unique_ptr<Sending> sending);
  void post_alone(int peer, MessageId id, std::span<const std::byte> head, Message message);
  void post_farewell(int peer, bool is_answer);
  void lose(int peer, const std::string& why);

  // --- hello.cc; with the mutex held ---
  void make_endpoint(const Acquaintance& who);
  // The same; whoever cannot be had is lost.
  void try_endpoint(const Acquaintance& who);
  [[nodiscard]] bool is_connected_to(const Acquaintance& who) const;
  [[nodiscard]] AddressBook list_known() const;
  void receive_coming(int peer);
  void post_hello(int peer, std::uint32_t channel, bool is_answer);
  void say_goodbye();

  int rank_;
  std::uint64_t token_ = 0;
  std::vector<Peer> peers_;
  std::map<std::uint32_t, std::shared_ptr<Receiver>> receivers_;
  std::weak_ptr<void> door_;
  int num_sending_ = 0;
  std::atomic<bool> has_answers_ = false;
  DrivenWorker worker_;  // goes first: it may call back until it is gone
  std::size_t max_header_bytes_;
};

}  // namespace tandem::net
