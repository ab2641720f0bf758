// Connections: who is connected to whom, and how a process is that comes after the others have met.
// It says hello to each of them; each connects to it, and answers, once it is done with the process
// that was the same rank before.
#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/net/connections.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

// The payload: the sender's address, or of an answer, whom it knows. Those whom it is for do not
// know the sender's token yet: the envelope has theirs.
struct Hello {
  Envelope envelope;
  std::uint64_t token;  // the sender's
  std::uint64_t is_answer;
};

}  // namespace

void Connections::connect(const Acquaintance& who) {
  const std::lock_guard lock(mutex());
  make_endpoint(who);
  peers_[who.rank].has_met = true;
}

void Connections::turn_to(const Acquaintance& who) {
  const std::lock_guard lock(mutex());
  try_endpoint(who);
}

void Connections::try_endpoint(const Acquaintance& who) {
  try {
    make_endpoint(who);
  } catch (const Error& error) {
    peers_[who.rank].endpoint = nullptr;
    lose(who.rank, error.message());
  }
}

void Connections::make_endpoint(const Acquaintance& who) {
  Peer& peer = peers_[who.rank];
  if (peer.endpoint != nullptr) worker_.ucx().drop(peer.endpoint);
  for (const Message& message : peer.held) {
    if (message.left) message.left();
  }
  peer = Peer();
  peer.token = who.token;
  peer.address = who.address;
  peer.lost.reset();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  // Without this mode a peer that is killed is never noticed.
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = this;
  check(ucp_ep_create(worker_.ucx().get(), &params, &peer.endpoint),
        "connecting to rank " + std::to_string(who.rank));
}

void Connections::make_room(int size) {
  const std::lock_guard lock(mutex());
  if (static_cast<std::size_t>(size) > peers_.size()) peers_.resize(static_cast<std::size_t>(size));
}

AddressBook Connections::book() {
  const std::lock_guard lock(mutex());
  return list_known();
}

AddressBook Connections::list_known() const {
  AddressBook known;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int rank = static_cast<int>(i);
    if (rank == rank_) {
      known.push_back({.rank = rank, .token = token_, .address = address()});
    } else if (!peers_[i].lost) {
      known.push_back({.rank = rank, .token = *peers_[i].token, .address = peers_[i].address});
    }
  }
  return known;
}

bool Connections::is_connected_to(const Acquaintance& who) const {
  return !peers_[who.rank].lost && peers_[who.rank].token == who.token;
}

void Connections::say_hello(int peer, std::uint32_t channel) {
  const std::lock_guard lock(mutex());
  post_hello(peer, channel, false);
}

void Connections::post_hello(int peer, std::uint32_t channel, bool is_answer) {
  const Hello hello{.envelope = {.token = peers_[peer].token.value_or(0),
                                 .source = static_cast<std::uint32_t>(rank_),
                                 .channel = channel},
                    .token = token_,
                    .is_answer = is_answer ? 1U : 0U};
  const auto payload =
      std::make_shared<std::vector<std::byte>>(is_answer ? encode(list_known()) : address());
  post_alone(peer, kHello, std::as_bytes(std::span(&hello, 1)),
             {.channel = channel, .header = {}, .payload = *payload, .keep = payload, .left = {}});
}

ucs_status_t Connections::on_hello(void* argument, const void* header, std::size_t header_bytes,
                                   void* data, std::size_t data_bytes,
                                   const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<Connections*>(argument);
  Hello hello;
  if (header_bytes != sizeof hello || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    return UCS_OK;
  }
  std::memcpy(&hello, header, sizeof hello);
  const auto source = static_cast<int>(hello.envelope.source);
  if (hello.envelope.token != self.token_ || hello.envelope.source >= self.peers_.size() ||
      source == self.rank_) {
    return UCS_OK;
  }
  const std::span bytes(static_cast<const std::byte*>(data), data_bytes);
  const std::uint32_t channel = hello.envelope.channel;
  if (hello.is_answer == 0) {
    if (bytes.empty()) return UCS_OK;
    self.peers_[source].coming = {
        .who = {.rank = source, .token = hello.token, .address = {bytes.begin(), bytes.end()}},
        .channel = channel,
        .has_said_hello = true};
  } else if (self.peers_[source].token == hello.token) {
    self.peers_[source].has_met = true;
    for (Acquaintance& each : decode_book(bytes).value_or(AddressBook())) {
      if (static_cast<std::size_t>(each.rank) >= self.peers_.size() || each.rank == self.rank_ ||
          (self.is_connected_to(each) && self.has_met(each.rank)) ||
          self.peers_[each.rank].coming) {
        continue;
      }
      Peer& peer = self.peers_[each.rank];
      peer.coming = {.who = std::move(each), .channel = channel, .has_said_hello = false};
    }
  }
  self.has_answers_ = true;  // seen to once UCX is done calling
  self.worker_.push();
  return UCS_OK;
}

void Connections::receive_coming(int peer) {
  const Coming coming = *peers_[peer].coming;
  if (!is_connected_to(coming.who)) {
    const auto receiver = receivers_.find(coming.channel);
    if (receiver == receivers_.end() ||
        !receiver->second->let_come(peer, peers_[peer].token.has_value())) {
      return;
    }
    try_endpoint(coming.who);
    if (peers_[peer].lost) return;
  }
  peers_[peer].coming.reset();
  if (coming.has_said_hello) peers_[peer].has_met = true;
  post_hello(peer, coming.channel, coming.has_said_hello);
}

}  // namespace tandem::net
