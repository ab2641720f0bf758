#include "backend/net/connections.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend/net/batch.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

using runtime::Deadline;

// The most payload of a batch. With all headers it still fits into one of the pieces that TCP sends
// (ucx_worker.cc), and so is read where it was received. Of 160, 200 and 240 KB the best for 8 rows
// to each of 4 experts (95, 85 and 93 us for a combine of 14 KB rows).
constexpr std::size_t kBatchBytes = std::size_t{200} << 10;

// How long a rank that leaves waits for its peers to have got everything. Only a peer that is
// stopped, or out of reach, takes longer than a round trip.
constexpr std::chrono::milliseconds kFarewellTimeout{2000};

struct Farewell {
  Envelope envelope;
  std::uint64_t is_answer;
};

}  // namespace

std::uint64_t random_token() {
  std::uint64_t token = 0;
  if (::getrandom(&token, sizeof token, 0) != static_cast<ssize_t>(sizeof token)) {
    throw Error(ErrorCode::kResource, std::string("no random bytes: ") + std::strerror(errno));
  }
  return token;
}

// Messages until their memory may be written again.
struct Connections::Sending {
  Connections* self = nullptr;
  std::vector<std::byte> head;
  std::vector<Message> messages;
  std::vector<std::byte> frames;     // of a batch, with the messages' headers
  std::vector<ucp_dt_iov_t> pieces;  // of a batch: what is sent, one after the other

  // Of a batch; the messages are all there.
  void frame() {
    std::size_t size = 0;
    for (const Message& message : messages) size += sizeof(Frame) + message.header.size();
    frames.resize(size);
    std::byte* at = frames.data();
    for (const Message& message : messages) {
      const Frame frame{.channel = message.channel,
                        .header_bytes = static_cast<std::uint32_t>(message.header.size()),
                        .payload_bytes = message.payload.size()};
      std::memcpy(at, &frame, sizeof frame);
      std::copy(message.header.begin(), message.header.end(), at + sizeof frame);
      const std::size_t bytes = sizeof frame + message.header.size();
      pieces.push_back({.buffer = at, .length = bytes});
      at += bytes;
      if (message.payload.empty()) continue;
      pieces.push_back({.buffer = const_cast<std::byte*>(message.payload.data()),
                        .length = message.payload.size()});
    }
  }

  void end() {
    for (const Message& message : messages) {
      if (message.left) message.left();
    }
    --self->num_sending_;
    delete this;
  }
};

// A payload on its way to where its receiver wants it.
struct Connections::Receiving {
  std::shared_ptr<Receiver> receiver;  // holds the memory
  std::function<void()> done;
};

Connections::Connections(int rank, int size)
    : rank_(rank),
      peers_(static_cast<std::size_t>(size)),
      max_header_bytes_(worker_.ucx().max_header_bytes() - sizeof(Envelope)) {
  peers_[rank].lost.reset();  // it needs no connection to itself
  worker_.ucx().set_handler(kMessage, on_message, this);
  worker_.ucx().set_handler(kBatch, on_batch, this);
  worker_.ucx().set_handler(kFarewell, on_farewell, this);
  worker_.ucx().set_handler(kHello, on_hello, this);
}

void Connections::start(std::uint64_t token) {
  token_ = token;
  worker_.start([this] { post_all_held(); });
}

Connections::~Connections() {
  say_goodbye();
  worker_.stop();
  // From here on this thread alone drives the worker; closing ends what is still being sent.
  for (Peer& peer : peers_) {
    if (peer.endpoint != nullptr) worker_.ucx().close(peer.endpoint, peer.lost.has_value());
  }
}

void Connections::attach(std::uint32_t channel, std::shared_ptr<Receiver> receiver) {
  const std::lock_guard lock(mutex());
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer].lost) receiver->peer_lost(static_cast<int>(peer));
  }
  receivers_[channel] = std::move(receiver);
}

void Connections::detach(std::uint32_t channel) {
  const std::lock_guard lock(mutex());
  receivers_.erase(channel);
}

std::vector<std::byte> Connections::seal(std::uint32_t channel,
                                         std::span<const std::byte> header) const {
  std::vector<std::byte> sealed(sizeof(Envelope) + header.size());
  const Envelope envelope{
      .token = token_, .source = static_cast<std::uint32_t>(rank_), .channel = channel};
  std::memcpy(sealed.data(), &envelope, sizeof envelope);
  std::copy(header.begin(), header.end(), sealed.begin() + sizeof envelope);
  return sealed;
}

void Connections::send(int peer, Message message) {
  Peer& to = peers_[peer];
  if (!to.held.empty()) {
    const bool has_room = to.held_bytes + message.payload.size() <= kBatchBytes;
    if (has_room) to.held.push_back(std::move(message));
    post_held(peer);
    if (has_room) return;
  }
  auto sending = std::make_unique<Sending>();
  sending->head = seal(message.channel, message.header);
  sending->messages.push_back(std::move(message));
  post(peer, kMessage, std::move(sending));
}

void Connections::answer(int peer, Message message) {
  Peer& to = peers_[peer];
  to.held_bytes += message.payload.size();
  to.held.push_back(std::move(message));
  has_answers_ = true;
  worker_.push();
}

void Connections::progress() {
  worker_.progress();
  if (!has_answers_.exchange(false)) return;
  const std::lock_guard lock(mutex());
  post_all_held();
}

void Connections::send_with_next(int peer, Message message) {
  if (message.payload.size() > kShortBytes) {
    send(peer, std::move(message));
    return;
  }
  Peer& to = peers_[peer];
  if (!to.held.empty() && to.held_bytes + message.payload.size() > kBatchBytes) post_held(peer);
  to.held_bytes += message.payload.size();
  to.held.push_back(std::move(message));
  if (to.held.size() == 1) {
    worker_.push();  // posts it, unless this thread has done so by then
  }
}

void Connections::post_all_held() {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int peer = static_cast<int>(i);
    if (peers_[i].coming) receive_coming(peer);
    if (!peers_[i].held.empty()) post_held(peer);
    if (!std::exchange(peers_[i].leaves, false)) continue;
    post_farewell(peer, true);
    lose(peer, "has closed its communicator");
  }
}

// With the mutex held, as post.
void Connections::post_held(int peer) {
  auto sending = std::make_unique<Sending>();
  sending->head = seal(0, {});
  sending->messages = std::exchange(peers_[peer].held, {});
  sending->frame();
  peers_[peer].held_bytes = 0;
  post(peer, kBatch, std::move(sending));
}

void Connections::post(int peer, MessageId message, std::unique_ptr<Sending> owned) {
  Sending* const sending = owned.release();  // ends itself
  sending->self = this;
  ++num_sending_;
  if (peers_[peer].lost || peers_[peer].endpoint == nullptr) {
    sending->end();
    return;
  }
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = sending;
  params.cb.send = [](void* request, ucs_status_t, void* user_data) {
    // An error shows by itself, through on_error.
    static_cast<Sending*>(user_data)->end();
    ucp_request_free(request);
  };
  const void* data = nullptr;
  std::size_t count = 0;
  if (message != kMessage) {
    // Whole, so that it is at hand when its handler is called.
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_EAGER;
  }
  if (message == kBatch) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_iov();
    data = sending->pieces.data();
    count = sending->pieces.size();
  } else if (!sending->messages.empty()) {
    data = sending->messages.front().payload.data();
    count = sending->messages.front().payload.size();
  }
  void* const request = ucp_am_send_nbx(peers_[peer].endpoint, message, sending->head.data(),
                                        sending->head.size(), data, count, &params);
  if (UCS_PTR_IS_PTR(request)) {
    worker_.push();
    return;
  }
  sending->end();
  if (UCS_PTR_IS_ERR(request)) lose(peer, ucs_status_string(UCS_PTR_STATUS(request)));
}

void Connections::rest() {
  const std::lock_guard lock(mutex());
  post_all_held();
  worker_.hand_over();
}

void Connections::leave() {
  const std::lock_guard lock(mutex());
  if (num_sending_ > 0) worker_.hand_over();
}

std::optional<Envelope> Connections::open(const void* header, std::size_t header_bytes) const {
  Envelope envelope;
  if (header_bytes < sizeof envelope) return {};
  std::memcpy(&envelope, header, sizeof envelope);
  if (envelope.source >= peers_.size() || envelope.token != peers_[envelope.source].token) {
    return {};
  }
  return envelope;
}

ucs_status_t Connections::on_message(void* argument, const void* header, std::size_t header_bytes,
                                     void* data, std::size_t data_bytes,
                                     const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<Connections*>(argument);
  const std::optional<Envelope> envelope = self.open(header, header_bytes);
  if (!envelope) return UCS_OK;
  const auto receiver = self.receivers_.find(envelope->channel);
  if (receiver == self.receivers_.end()) return UCS_OK;  // its buffer is gone
  auto delivery = receiver->second->accept(
      static_cast<int>(envelope->source),
      {static_cast<const std::byte*>(header) + sizeof(Envelope), header_bytes - sizeof(Envelope)},
      data_bytes);
  if (!delivery) return UCS_OK;
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
    if (data_bytes > 0) std::memcpy(delivery->where, data, data_bytes);
    delivery->done();
    return UCS_OK;
  }
  auto receiving = std::make_unique<Receiving>(
      Receiving{.receiver = receiver->second, .done = std::move(delivery->done)});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.user_data = receiving.get();
  params.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* user_data) {
    const std::unique_ptr<Receiving> ended(static_cast<Receiving*>(user_data));
    if (status == UCS_OK) ended->done();
    ucp_request_free(request);
  };
  void* const request =
      ucp_am_recv_data_nbx(self.worker_.ucx().get(), data, delivery->where, data_bytes, &params);
  if (UCS_PTR_IS_PTR(request)) {
    static_cast<void>(receiving.release());
  } else if (UCS_PTR_STATUS(request) == UCS_OK) {
    receiving->done();
  }
  return UCS_INPROGRESS;
}

ucs_status_t Connections::on_batch(void* argument, const void* header, std::size_t header_bytes,
                                   void* data, std::size_t data_bytes,
                                   const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<Connections*>(argument);
  const std::optional<Envelope> envelope = self.open(header, header_bytes);
  if (!envelope || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
  for_each_in_batch({static_cast<const std::byte*>(data), data_bytes},
                    [&](std::uint32_t channel, std::span<const std::byte> part_header,
                        std::span<const std::byte> payload) {
                      const auto receiver = self.receivers_.find(channel);
                      if (receiver == self.receivers_.end()) return;
                      const auto delivery = receiver->second->accept(
                          static_cast<int>(envelope->source), part_header, payload.size());
                      if (!delivery) return;
                      std::copy(payload.begin(), payload.end(), delivery->where);
                      delivery->done();
                    });
  return UCS_OK;
}

ucs_status_t Connections::on_farewell(void* argument, const void* header, std::size_t header_bytes,
                                      void*, std::size_t, const ucp_am_recv_param_t*) {
  auto& self = *static_cast<Connections*>(argument);
  const std::optional<Envelope> envelope = self.open(header, header_bytes);
  if (!envelope || header_bytes != sizeof(Farewell)) return UCS_OK;
  Farewell farewell;
  std::memcpy(&farewell, header, sizeof farewell);
  const int peer = static_cast<int>(envelope->source);
  if (farewell.is_answer != 0) {
    self.peers_[peer].has_all = true;
  } else {
    self.peers_[peer].leaves = true;  // answered once UCX is done calling, as in answer()
    self.has_answers_ = true;
    self.worker_.push();
  }
  return UCS_OK;
}

void Connections::on_error(void* argument, ucp_ep_h endpoint, ucs_status_t status) {
  auto& self = *static_cast<Connections*>(argument);
  for (std::size_t peer = 0; peer < self.peers_.size(); ++peer) {
    if (self.peers_[peer].endpoint == endpoint) {
      self.lose(static_cast<int>(peer),
                std::string("is out of reach: ") + ucs_status_string(status));
    }
  }
}

void Connections::lose(int peer, const std::string& why) {
  if (peers_[peer].lost) return;
  peers_[peer].lost = why;
  for (const auto& [channel, receiver] : receivers_) receiver->peer_lost(peer);
  if (peers_[peer].coming) has_answers_ = true;  // its time may have come
  worker_.changed().notify_all();
}

void Connections::post_alone(int peer, MessageId id, std::span<const std::byte> head,
                             Message message) {
  auto sending = std::make_unique<Sending>();
  sending->head.assign(head.begin(), head.end());
  sending->messages.push_back(std::move(message));
  post(peer, id, std::move(sending));
}

void Connections::post_farewell(int peer, bool is_answer) {
  const Farewell farewell{
      .envelope = {.token = token_, .source = static_cast<std::uint32_t>(rank_), .channel = 0},
      .is_answer = is_answer ? 1U : 0U};
  post_alone(peer, kFarewell, std::as_bytes(std::span(&farewell, 1)), {});
}

// Without this a rank that has done its part and ends could take along what its peers have not read
// yet: the system resets a connection that is closed with unread bytes.
void Connections::say_goodbye() {
  std::unique_lock lock(mutex());
  post_all_held();
  const Deadline deadline = Deadline::after(kFarewellTimeout);
  worker_.changed().wait_until(lock, deadline.at(), [this] { return num_sending_ == 0; });
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    post_farewell(static_cast<int>(peer), false);
  }
  worker_.changed().wait_until(lock, deadline.at(), [this] {
    for (const Peer& peer : peers_) {
      if (peer.endpoint != nullptr && !peer.lost && !peer.has_all) return false;
    }
    return true;
  });
}

}  // namespace tandem::net
