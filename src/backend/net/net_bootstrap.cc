#include "backend/net/net_bootstrap.h"

#include <algorithm>
#include <cstring>

#include "backend/net/remote_link.h"
#include "runtime/agreement.h"
#include "runtime/socket_bootstrap.h"
#include "runtime/socket_channel.h"

namespace tandem::net {
namespace {

using runtime::Bootstrap;
using runtime::Deadline;
using runtime::Exchange;
using runtime::Failure;
using runtime::setup_failure;

constexpr std::uint32_t kBootstrapChannel = 0;

struct ExchangeHeader {
  std::uint64_t round;
  std::uint32_t kind;
  std::uint32_t is_failure;
};

// What ranks tell each other before they are connected: this, then the address of the rank's UCX
// worker, or, where it has none, why.
struct Calling {
  std::uint64_t magic;
  std::uint64_t token;  // rank 0's counts
  std::uint64_t is_failure;
};

constexpr std::uint64_t kMagic = 0x31'74'65'6e'4d'44'4e'54;  // "TNDMnet1"

[[noreturn]] void refuse_gathered(int rank) {
  throw Error(ErrorCode::kInvalidArgument, "all_gather returned something else for rank " +
                                               std::to_string(rank) + " than that rank's message");
}

}  // namespace

std::optional<Receiver::Delivery> Exchanges::accept(int source, std::span<const std::byte> bytes,
                                                    std::size_t payload_bytes) {
  ExchangeHeader header;
  if (bytes.size() != sizeof header || payload_bytes > runtime::kMaxMessageBytes) return {};
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto part = std::make_shared<Part>(Part{.round = header.round,
                                                .kind = static_cast<Exchange>(header.kind),
                                                .message = std::vector<std::byte>(payload_bytes)});
  return Delivery{
      .where = part->message.data(),
      .done = [self = shared_from_this(), source, part, is_failure = header.is_failure != 0] {
        if (!is_failure) {
          self->parts_[source].push_back(std::move(*part));
        } else if (auto failure = runtime::decode_failure(part->message);
                   failure && !self->failed_) {
          self->failed_ = {.round = part->round, .failure = std::move(*failure)};
        }
      }};
}

Exchanges::Part* Exchanges::find(int source, std::uint64_t round) {
  for (Part& part : parts_[source]) {
    if (part.round == round) return &part;
  }
  return nullptr;
}

void Exchanges::forget(std::uint64_t round) {
  for (auto& parts : parts_) {
    std::erase_if(parts, [round](const Part& part) { return part.round <= round; });
  }
}

NetBootstrap::NetBootstrap(const runtime::Party& party, const Communicator::AllGather& all_gather)
    : party_(party), exchanges_(std::make_shared<Exchanges>(party.size)) {
  connect(all_gather);
  const auto own = std::find(party.host_ranks.begin(), party.host_ranks.end(), party.rank);
  host_ = runtime::agree(*this, [&] {
    return runtime::connect_by_name(party.host_name,
                                    static_cast<int>(own - party.host_ranks.begin()),
                                    static_cast<int>(party.host_ranks.size()), party.timeout);
  });
}

NetBootstrap::~NetBootstrap() { connections_->detach(kBootstrapChannel); }

// Every rank takes part in the gathering, also one that has no network, so that all hear of it.
void NetBootstrap::connect(const Communicator::AllGather& all_gather) {
  std::vector<std::byte> own;
  Calling calling{.magic = kMagic, .token = 0, .is_failure = 0};
  std::optional<Error> problem;
  try {
    calling.token = random_token();
    connections_ = std::make_shared<Connections>(party_.rank, party_.size);
    own = connections_->address();
  } catch (const Error& error) {
    problem = error;
    calling.is_failure = 1;
    own = runtime::encode({.info = error.info(), .message = error.what()});
  }
  const auto head = std::as_bytes(std::span(&calling, 1));
  own.insert(own.begin(), head.begin(), head.end());
  const auto all = all_gather(own);
  if (problem) throw *problem;
  if (all.size() != static_cast<std::size_t>(party_.size)) {
    throw Error(ErrorCode::kInvalidArgument, "all_gather returned " + std::to_string(all.size()) +
                                                 " messages for " + std::to_string(party_.size) +
                                                 " ranks");
  }

  std::uint64_t token = 0;
  for (int peer = 0; peer < party_.size; ++peer) {
    if (all[peer].size() <= sizeof calling) refuse_gathered(peer);
    std::memcpy(&calling, all[peer].data(), sizeof calling);
    if (calling.magic != kMagic) refuse_gathered(peer);
    const auto rest = std::span(all[peer]).subspan(sizeof calling);
    if (calling.is_failure != 0) {
      if (auto failure = runtime::decode_failure(rest)) {
        failure->info.peer = peer;
        failure->message = "rank " + std::to_string(peer) + " failed: " + failure->message;
        failure->raise();
      }
    }
    if (peer == 0) token = calling.token;
    if (peer == party_.rank) continue;
    connections_->connect({.rank = peer, .token = token, .address = {rest.begin(), rest.end()}});
  }
  connections_->attach(kBootstrapChannel, exchanges_);
  connections_->start(token);
  barrier();
}

void NetBootstrap::send(int peer, Exchange kind, bool is_failure,
                        std::span<const std::byte> message) {
  const ExchangeHeader header{.round = round_,
                              .kind = static_cast<std::uint32_t>(kind),
                              .is_failure = is_failure ? 1U : 0U};
  const auto head = std::as_bytes(std::span(&header, 1));
  const auto payload = std::make_shared<std::vector<std::byte>>(message.begin(), message.end());
  const std::lock_guard lock(connections_->mutex());
  connections_->send(peer, {.channel = kBootstrapChannel,
                            .header = {head.begin(), head.end()},
                            .payload = *payload,
                            .keep = payload,
                            .left = {}});
}

std::vector<std::vector<std::byte>> NetBootstrap::exchange(Exchange kind,
                                                           std::span<const std::byte> message) {
  const auto start = Deadline::Clock::now();
  const Deadline deadline = Deadline::after(party_.timeout);
  {
    const std::lock_guard lock(connections_->mutex());
    if (exchanges_->failed()) exchanges_->failed()->failure.raise();
  }
  ++round_;
  for (int peer = 0; peer < party_.size; ++peer) {
    if (peer != party_.rank) send(peer, kind, false, message);
  }

  std::unique_lock lock(connections_->mutex());
  const auto has_come = [&](int peer) {
    return peer == party_.rank || exchanges_->find(peer, round_) != nullptr;
  };
  for (int peer = 0; peer < party_.size;) {
    const auto& failed = exchanges_->failed();
    if (failed && failed->round <= round_) failed->failure.raise();
    if (has_come(peer)) {
      if (peer != party_.rank && exchanges_->find(peer, round_)->kind != kind) {
        fail(std::move(lock), runtime::exchange_mismatch(peer, exchanges_->find(peer, round_)->kind,
                                                         party_.rank, kind));
      }
      ++peer;
      continue;
    }
    if (const auto& lost = connections_->lost(peer)) {
      fail(std::move(lock),
           setup_failure(ErrorCode::kPeerLost, peer, "rank " + std::to_string(peer) + " " + *lost));
    }
    if (deadline.passed()) {
      std::vector<int> missing;
      for (int late = peer; late < party_.size; ++late) {
        if (!has_come(late)) missing.push_back(late);
      }
      fail(std::move(lock),
           runtime::missing_ranks_failure(missing, party_.size, runtime::name(kind),
                                          Deadline::Clock::now() - start, party_.timeout));
    }
    connections_->wait(lock, deadline);
  }

  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(party_.size));
  for (int peer = 0; peer < party_.size; ++peer) {
    if (peer == party_.rank) {
      all[peer].assign(message.begin(), message.end());
    } else {
      all[peer] = std::move(exchanges_->find(peer, round_)->message);
    }
  }
  exchanges_->forget(round_);
  return all;
}

void NetBootstrap::fail(std::unique_lock<std::mutex> lock, Failure failure) {
  exchanges_->failed() = {.round = round_, .failure = failure};
  lock.unlock();
  const std::vector<std::byte> message = runtime::encode(failure);
  for (int peer = 0; peer < party_.size; ++peer) {
    if (peer != party_.rank) send(peer, Exchange::kMessages, true, message);
  }
  failure.raise();
}

std::vector<std::vector<std::byte>> NetBootstrap::all_gather(std::span<const std::byte> message) {
  if (message.size() > runtime::kMaxMessageBytes) {
    throw Error(ErrorCode::kInvalidArgument, "a message of " + std::to_string(message.size()) +
                                                 " bytes is longer than " +
                                                 std::to_string(runtime::kMaxMessageBytes));
  }
  return exchange(Exchange::kMessages, message);
}

void NetBootstrap::barrier() { static_cast<void>(exchange(Exchange::kBarrier, {})); }

std::vector<runtime::Descriptor> NetBootstrap::all_gather_descriptors(const runtime::Descriptor&) {
  throw Error(ErrorCode::kUnreachable, "descriptors do not travel between hosts");
}

std::vector<std::shared_ptr<void>> NetBootstrap::all_gather_objects(std::shared_ptr<void>) {
  throw Error(ErrorCode::kUnreachable, "objects do not travel between hosts");
}

std::unique_ptr<runtime::RemotePeers> NetBootstrap::open(runtime::RemoteMemory memory) {
  const int num_ranks = std::max(party_.size, memory.num_ranks);
  connections_->make_room(num_ranks);
  return std::make_unique<RemoteLink>(connections_, next_channel_++, num_ranks, std::move(memory),
                                      party_.secret);
}

}  // namespace tandem::net
