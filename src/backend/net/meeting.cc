#include "backend/net/meeting.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "backend/net/driven_worker.h"
#include "backend/net/socket_address.h"
#include "runtime/deadline.h"
#include "runtime/failure.h"
#include "runtime/socket_bootstrap.h"
#include "runtime/socket_channel.h"

namespace tandem::net {
namespace {

using runtime::Deadline;
using runtime::Failure;
using runtime::setup_failure;
using std::chrono::milliseconds;
using Messages = std::vector<std::vector<std::byte>>;

// The active messages of a meeting.
enum MessageId : unsigned {
  kContribution = 0,  // ContributionHeader; the secret, then the message
  kEntered = 1,       // rank 0 is there: it will send a result or a failure
  kResult = 2,        // round; every rank's message, each behind its length
  kFailure = 3,       // an encoded Failure
};

struct ContributionHeader {
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t secret_bytes;
  std::uint64_t round;
  std::int64_t patience_ms;  // how long the sender will wait from now on; negative: for ever
};

constexpr std::uint32_t kVersion = 2;

// Between two attempts to connect.
constexpr milliseconds kPause{50};

std::vector<std::byte> join(const Messages& messages) {
  std::vector<std::byte> joined;
  for (const auto& message : messages) {
    const std::uint64_t length = message.size();
    const auto head = std::as_bytes(std::span(&length, 1));
    joined.insert(joined.end(), head.begin(), head.end());
    joined.insert(joined.end(), message.begin(), message.end());
  }
  return joined;
}

std::optional<Messages> split(std::span<const std::byte> joined, int size) {
  Messages messages;
  for (std::uint64_t length = 0; joined.size() >= sizeof length;) {
    std::memcpy(&length, joined.data(), sizeof length);
    joined = joined.subspan(sizeof length);
    if (length > joined.size()) return {};
    messages.emplace_back(joined.begin(), joined.begin() + static_cast<std::ptrdiff_t>(length));
    joined = joined.subspan(length);
  }
  if (messages.size() != static_cast<std::size_t>(size) || !joined.empty()) return {};
  return messages;
}

// What both sides have. Members are under the worker's mutex; handlers run with it held.
class Meeting {
 public:
  explicit Meeting(MeetingPlace place) : place_(std::move(place)) {}
  virtual ~Meeting() = default;
  [[nodiscard]] virtual Messages gather(std::span<const std::byte> message) = 0;

 protected:
  [[nodiscard]] std::string what() const { return "the rendezvous at " + place_.address; }

  // Sends copies, and does not wait. With the mutex held.
  void send(ucp_ep_h endpoint, unsigned message, std::vector<std::byte> header,
            std::vector<std::byte> payload) {
    struct Sending {
      std::vector<std::byte> header;
      std::vector<std::byte> payload;
    };
    auto sending = std::make_unique<Sending>(Sending{std::move(header), std::move(payload)});
    ucp_request_param_t params{};
    params.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    // Whole, so that handlers find the payload at hand; what is gathered here is short.
    params.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    params.user_data = sending.get();
    params.cb.send = [](void* request, ucs_status_t, void* user_data) {
      delete static_cast<Sending*>(user_data);
      ucp_request_free(request);
    };
    void* const request =
        ucp_am_send_nbx(endpoint, message, sending->header.data(), sending->header.size(),
                        sending->payload.data(), sending->payload.size(), &params);
    if (!UCS_PTR_IS_PTR(request)) return;
    static_cast<void>(sending.release());
    worker_.push();
  }

  MeetingPlace place_;
  DrivenWorker worker_;
};

// The listening side.
class Host final : public Meeting {
 public:
  explicit Host(const MeetingPlace& place) : Meeting(place) {
    worker_.ucx().set_handler(kContribution, on_contribution, this);
    const SocketAddress address = resolve(place.address, true);
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = address.generic();
    params.sockaddr.addrlen = address.length;
    params.conn_handler.cb = on_connection;
    params.conn_handler.arg = this;
    check(ucp_listener_create(worker_.ucx().get(), &params, &listener_),
          "rank 0's listening at " + place.address);
    worker_.start();
  }
  ~Host() override {
    worker_.stop();
    ucp_listener_destroy(listener_);
    for (const auto& [endpoint, is_gone] : endpoints_) worker_.ucx().close(endpoint, is_gone);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  Messages gather(std::span<const std::byte> message) override {
    const auto start = Deadline::Clock::now();
    std::unique_lock lock(worker_.mutex());
    ++round_;
    deadline_ = deadline_.earlier_of(Deadline::after(place_.timeout));
    for (;;) {
      if (failure_) fail();
      if (static_cast<int>(members_.size()) == place_.size - 1) break;
      if (deadline_.passed()) {
        failure_ = runtime::missing_ranks_failure(missing(), place_.size, what(),
                                                  Deadline::Clock::now() - start, place_.timeout);
      } else {
        worker_.wait(lock, deadline_);
      }
    }
    Messages all;
    all.emplace_back(message.begin(), message.end());
    for (auto& [rank, member] : members_) all.push_back(std::move(member.message));
    const std::vector<std::byte> joined = join(all);
    const auto head = std::as_bytes(std::span(&round_, 1));
    for (const auto& [rank, member] : members_) {
      send(member.endpoint, kResult, {head.begin(), head.end()}, joined);
    }
    // Members may come to the next round before this rank does.
    members_.clear();
    deadline_ = Deadline::never();
    return all;
  }

 private:
  struct Member {
    ucp_ep_h endpoint;
    std::vector<std::byte> message;
  };

  [[nodiscard]] std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < place_.size; ++rank) {
      if (!members_.contains(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

  static void on_connection(ucp_conn_request_h request, void* argument) {
    auto& self = *static_cast<Host*>(argument);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.conn_request = request;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_error;
    params.err_handler.arg = argument;
    ucp_ep_h endpoint = nullptr;
    // A connection that cannot be taken is its owner's to try again.
    if (ucp_ep_create(self.worker_.ucx().get(), &params, &endpoint) == UCS_OK) {
      self.endpoints_[endpoint] = false;
    }
  }

  static void on_error(void* argument, ucp_ep_h endpoint, ucs_status_t) {
    auto& self = *static_cast<Host*>(argument);
    const auto found = self.endpoints_.find(endpoint);
    if (found == self.endpoints_.end()) return;
    found->second = true;
    for (const auto& [rank, member] : self.members_) {
      if (member.endpoint != endpoint || self.failure_) continue;
      self.failure_ = setup_failure(
          ErrorCode::kPeerLost, rank,
          "rank " + std::to_string(rank) + " left " + self.what() + " before its end");
    }
  }

  static ucs_status_t on_contribution(void* argument, const void* header, std::size_t header_bytes,
                                      void* data, std::size_t data_bytes,
                                      const ucp_am_recv_param_t* param) {
    auto& self = *static_cast<Host*>(argument);
    ContributionHeader hello;
    if (header_bytes != sizeof hello || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
      return UCS_OK;  // nothing that a rank of ours says
    }
    std::memcpy(&hello, header, sizeof hello);
    const std::span bytes(static_cast<const std::byte*>(data), data_bytes);
    self.take(hello, bytes, param->reply_ep);
    return UCS_OK;
  }

  void take(const ContributionHeader& hello, std::span<const std::byte> bytes, ucp_ep_h endpoint) {
    if (hello.secret_bytes > bytes.size() ||
        !same_secret(place_.secret, bytes.first(hello.secret_bytes))) {
      tell(endpoint, setup_failure(ErrorCode::kInvalidArgument, -1,
                                   "rank 0 of " + what() + " has another secret"));
      return;
    }
    if (!failure_) {
      failure_ = runtime::contradiction(
          {.version = hello.version, .rank = hello.rank, .size = hello.size},
          {.version = kVersion, .rank = 0, .size = place_.size},
          [this](int rank) { return members_.contains(rank); }, what());
    }
    if (failure_) {
      tell(endpoint, *failure_);
      return;
    }
    if (hello.patience_ms >= 0) {
      deadline_ = deadline_.earlier_of(Deadline::after(milliseconds(hello.patience_ms)));
    }
    bytes = bytes.subspan(hello.secret_bytes);
    members_[hello.rank] = {.endpoint = endpoint, .message = {bytes.begin(), bytes.end()}};
    send(endpoint, kEntered, {}, {});
  }

  void tell(ucp_ep_h endpoint, const Failure& failure) {
    send(endpoint, kFailure, {}, runtime::encode(failure));
  }

  // Tells everybody who has come.
  [[noreturn]] void fail() {
    for (const auto& [rank, member] : members_) tell(member.endpoint, *failure_);
    failure_->raise();
  }

  ucp_listener_h listener_ = nullptr;
  std::map<ucp_ep_h, bool> endpoints_;  // whether it has failed
  std::map<int, Member> members_;       // who has contributed to the round at hand
  std::uint64_t round_ = 0;
  Deadline deadline_ = Deadline::never();
  std::optional<Failure> failure_;
};

// The others.
class Guest final : public Meeting {
 public:
  explicit Guest(const MeetingPlace& place)
      : Meeting(place), address_(resolve(place.address, false)) {
    worker_.ucx().set_handler(kEntered, on_entered, this);
    worker_.ucx().set_handler(kResult, on_result, this);
    worker_.ucx().set_handler(kFailure, on_failure, this);
    worker_.start();
  }
  ~Guest() override {
    worker_.stop();
    close();
  }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

  Messages gather(std::span<const std::byte> message) override {
    const auto start = Deadline::Clock::now();
    const Deadline deadline = Deadline::after(place_.timeout);
    std::unique_lock lock(worker_.mutex());
    ++round_;
    result_.reset();
    host_is_here_ = false;
    for (;;) {
      if (endpoint_ == nullptr) connect();
      contribute(message, deadline);
      const auto limit = [&] {
        return host_is_here_ ? deadline.extended_by(runtime::kVerdictGrace) : deadline;
      };
      while (!result_ && !failure_ && !broken_ && !limit().passed()) worker_.wait(lock, limit());
      if (result_) return std::move(*result_);
      if (failure_) failure_->raise();
      if (limit().passed()) {
        const int host[] = {0};
        runtime::missing_ranks_failure(host, place_.size, what(), Deadline::Clock::now() - start,
                                       place_.timeout)
            .raise();
      }
      if (host_is_here_ || round_ > 1) {
        setup_failure(ErrorCode::kPeerLost, 0, "rank 0 left " + what() + " before its end").raise();
      }
      // Not there yet. Nothing tells when it comes.
      close();
      lock.unlock();
      std::this_thread::sleep_for(kPause);
      lock.lock();
    }
  }

 private:
  void connect() {
    broken_ = false;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr.addr = address_.generic();
    params.sockaddr.addrlen = address_.length;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
      static_cast<Guest*>(self)->broken_ = true;
    };
    params.err_handler.arg = this;
    check(ucp_ep_create(worker_.ucx().get(), &params, &endpoint_), "connecting to " + what());
  }

  void close() {
    if (endpoint_ != nullptr) worker_.ucx().close(std::exchange(endpoint_, nullptr), broken_);
  }

  void contribute(std::span<const std::byte> message, const Deadline& deadline) {
    const auto left =
        std::chrono::ceil<milliseconds>(deadline.at() - Deadline::Clock::now()).count();
    const ContributionHeader hello{
        .version = kVersion,
        .rank = place_.rank,
        .size = place_.size,
        .secret_bytes = static_cast<std::uint32_t>(place_.secret.size()),
        .round = round_,
        .patience_ms = deadline.is_never() ? -1 : std::max<std::int64_t>(left, 0)};
    const auto head = std::as_bytes(std::span(&hello, 1));
    const auto secret = std::as_bytes(std::span(place_.secret.data(), place_.secret.size()));
    std::vector<std::byte> payload(secret.begin(), secret.end());
    payload.insert(payload.end(), message.begin(), message.end());
    send(endpoint_, kContribution, {head.begin(), head.end()}, std::move(payload));
  }

  static ucs_status_t on_entered(void* self, const void*, std::size_t, void*, std::size_t,
                                 const ucp_am_recv_param_t*) {
    static_cast<Guest*>(self)->host_is_here_ = true;
    return UCS_OK;
  }

  static ucs_status_t on_result(void* argument, const void* header, std::size_t header_bytes,
                                void* data, std::size_t data_bytes,
                                const ucp_am_recv_param_t* param) {
    auto& self = *static_cast<Guest*>(argument);
    std::uint64_t round = 0;
    if (header_bytes != sizeof round || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      return UCS_OK;
    }
    std::memcpy(&round, header, sizeof round);
    if (round == self.round_) {
      self.result_ = split({static_cast<const std::byte*>(data), data_bytes}, self.place_.size);
    }
    return UCS_OK;
  }

  static ucs_status_t on_failure(void* argument, const void*, std::size_t, void* data,
                                 std::size_t data_bytes, const ucp_am_recv_param_t* param) {
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
    static_cast<Guest*>(argument)->failure_ =
        runtime::decode_failure({static_cast<const std::byte*>(data), data_bytes});
    return UCS_OK;
  }

  SocketAddress address_;
  ucp_ep_h endpoint_ = nullptr;
  std::uint64_t round_ = 0;
  bool host_is_here_ = false;
  bool broken_ = false;
  std::optional<Messages> result_;
  std::optional<Failure> failure_;
};

// UCX lists the interfaces that are up once, when a worker is made.
void await_way(const MeetingPlace& place) {
  const SocketAddress address = resolve(place.address, false);
  const Deadline deadline = Deadline::after(place.timeout);
  while (!is_within_reach(address)) {
    if (deadline.passed()) {
      setup_failure(ErrorCode::kTimeout, 0,
                    "this host knows no way to " + place.address +
                        ", where ranks are to meet: no interface that leads there is up")
          .raise();
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

Communicator::AllGather meet(const MeetingPlace& place) {
  await_way(place);
  std::shared_ptr<Meeting> meeting;
  if (place.rank == 0) {
    meeting = std::make_shared<Host>(place);
  } else {
    meeting = std::make_shared<Guest>(place);
  }
  return [meeting](std::span<const std::byte> message) { return meeting->gather(message); };
}

}  // namespace tandem::net
