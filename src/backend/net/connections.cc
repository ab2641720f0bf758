#include "backend/net/connections.h"

#include <cstring>

#include "tandem/error.h"

namespace tandem::net {
namespace {

using runtime::Deadline;

// The active messages of a worker.
constexpr unsigned kMessage = 0;
constexpr unsigned kFarewell = 1;

// How long a rank that leaves waits for its peers to have got everything. Only a peer that is
// stopped, or out of reach, takes longer than a round trip.
constexpr std::chrono::milliseconds kFarewellTimeout{2000};

struct Farewell {
  Envelope envelope;
  std::uint64_t is_answer;
};

}  // namespace

// A message until its memory may be written again.
struct Connections::Sending {
  Connections* self = nullptr;
  std::vector<std::byte> head;
  std::shared_ptr<const void> keep;
  std::function<void()> left;

  void end() {
    if (left) left();
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
  worker_.ucx().set_handler(kMessage, on_message, this);
  worker_.ucx().set_handler(kFarewell, on_farewell, this);
}

void Connections::start(std::uint64_t token) {
  token_ = token;
  worker_.start();
}

Connections::~Connections() {
  say_goodbye();
  worker_.stop();
  // From here on this thread alone drives the worker; closing ends what is still being sent.
  for (Peer& peer : peers_) {
    if (peer.endpoint != nullptr) worker_.ucx().close(peer.endpoint, peer.lost.has_value());
  }
}

void Connections::connect(int peer, std::span<const std::byte> address) {
  const std::lock_guard lock(mutex());
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  // Without this mode a peer that is killed is never noticed.
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = this;
  check(ucp_ep_create(worker_.ucx().get(), &params, &peers_[peer].endpoint),
        "connecting to rank " + std::to_string(peer));
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

void Connections::send(int peer, Message message) {
  std::vector<std::byte> header(sizeof(Envelope) + message.header.size());
  const Envelope envelope{
      .token = token_, .source = static_cast<std::uint32_t>(rank_), .channel = message.channel};
  std::memcpy(header.data(), &envelope, sizeof envelope);
  if (!message.header.empty()) {
    std::memcpy(header.data() + sizeof envelope, message.header.data(), message.header.size());
  }
  const std::lock_guard lock(mutex());
  post(peer, kMessage, std::move(header), std::move(message));
}

// With the mutex held.
void Connections::post(int peer, unsigned message, std::vector<std::byte> header, Message body) {
  const std::span<const std::byte> payload = body.payload;
  auto* const sending = new Sending;
  sending->self = this;
  sending->head = std::move(header);
  sending->keep = std::move(body.keep);
  sending->left = std::move(body.left);
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
  void* const request =
      ucp_am_send_nbx(peers_[peer].endpoint, message, sending->head.data(), sending->head.size(),
                      payload.data(), payload.size(), &params);
  if (UCS_PTR_IS_PTR(request)) {
    worker_.push();
    return;
  }
  sending->end();
  if (UCS_PTR_IS_ERR(request)) lose(peer, ucs_status_string(UCS_PTR_STATUS(request)));
}

void Connections::rest() {
  const std::lock_guard lock(mutex());
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
  if (envelope.token != token_ || envelope.source >= peers_.size()) return {};
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
    self.post_farewell(peer, true);
    self.lose(peer, "has closed its communicator");
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
  worker_.changed().notify_all();
}

void Connections::post_farewell(int peer, bool is_answer) {
  const Farewell farewell{
      .envelope = {.token = token_, .source = static_cast<std::uint32_t>(rank_), .channel = 0},
      .is_answer = is_answer ? 1U : 0U};
  const auto bytes = std::as_bytes(std::span(&farewell, 1));
  post(peer, kFarewell, {bytes.begin(), bytes.end()}, {});
}

// Without this a rank that has done its part and ends could take along what its peers have not read
// yet: the system resets a connection that is closed with unread bytes.
void Connections::say_goodbye() {
  std::unique_lock lock(mutex());
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
