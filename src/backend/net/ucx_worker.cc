#include "backend/net/ucx_worker.h"

#include <ucs/config/global_opts.h>

#include <cstdlib>
#include <thread>

#include "runtime/deadline.h"
#include "tandem/error.h"

namespace tandem::net {
namespace {

using runtime::Deadline;

constexpr std::chrono::milliseconds kCloseTimeout{1000};

// Many times what a burst of messages takes. UCX 1.13 may go on for ever: over shared memory it
// asks and asks whether a peer is alive that has ended and whose parent has not taken note.
constexpr int kMostTurns = 1000;

// Sets what the user has left open.
void set_default(ucp_config_t* config, const std::string& name, const char* value) {
  if (std::getenv(("UCX_" + name).c_str()) != nullptr) return;
  check(ucp_config_modify(config, name.c_str(), value), "setting UCX's " + name);
  // UCX 1.13 knows what belongs to a transport without the transport's name only, and says nothing
  // of names that it does not know; 1.20 refuses them.
  for (const std::string transport : {"TCP_", "MM_"}) {
    if (!name.starts_with(transport)) continue;
    static_cast<void>(ucp_config_modify(config, name.substr(transport.size()).c_str(), value));
  }
}

ucp_context_h make_context() {
  // What fails becomes an Error; UCX would print each refused attempt to connect besides.
  if (std::getenv("UCX_LOG_LEVEL") == nullptr) ucs_global_opts_set_value("LOG_LEVEL", "fatal");
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "reading UCX's configuration");
  // Ranks that can share memory do so without UCX. Where UCX thinks that others can too
  // (containers of one kernel), it is mistaken.
  set_default(config, "TLS", "^sm");
  // Where the user has it use shared memory. Without this it does so only for endpoints that need
  // not notice that a peer has ended, which are none of Tandem's.
  set_default(config, "MM_ERROR_HANDLING", "y");
  // UCX's own is 8 KB: what is copied on its way would go in pieces of that, each a system call.
  set_default(config, "TCP_TX_SEG_SIZE", "256K");
  set_default(config, "TCP_RX_SEG_SIZE", "256K");
  // What is copied on its way anyway is copied once more here: sent from where it lies, a batch of
  // more than a few pieces goes in fragments, which the receiver has to put together.
  set_default(config, "ZCOPY_THRESH", "inf");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  check(status, "starting UCX");
  return context;
}

}  // namespace

void check(ucs_status_t status, const std::string& what) {
  if (status == UCS_OK) return;
  throw Error(ErrorCode::kResource,
              what + " failed: " + std::string(ucs_status_string(status)) + " (UCX)");
}

UcxWorker::UcxWorker() : context_(make_context()) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = ucp_worker_create(context_, &params, &worker_);
  if (status == UCS_OK) {
    status = ucp_worker_get_efd(worker_, &event_fd_);
    if (status != UCS_OK) ucp_worker_destroy(worker_);
  }
  if (status != UCS_OK) {
    ucp_cleanup(context_);
    check(status, "making a UCX worker");
  }
}

UcxWorker::~UcxWorker() {
  ucp_worker_destroy(worker_);
  ucp_cleanup(context_);
}

std::vector<std::byte> UcxWorker::address() const {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
  check(ucp_worker_query(worker_, &attributes), "asking UCX for this rank's address");
  const auto* const begin = reinterpret_cast<const std::byte*>(attributes.address);
  std::vector<std::byte> address(begin, begin + attributes.address_length);
  ucp_worker_release_address(worker_, attributes.address);
  return address;
}

std::size_t UcxWorker::max_header_bytes() const {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  check(ucp_worker_query(worker_, &attributes), "asking UCX for its limits");
  return attributes.max_am_header;
}

void UcxWorker::set_handler(unsigned message, ucp_am_recv_callback_t handler, void* argument) {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  params.id = message;
  params.cb = handler;
  params.arg = argument;
  params.flags = UCP_AM_FLAG_WHOLE_MSG;
  check(ucp_worker_set_am_recv_handler(worker_, &params), "installing a UCX handler");
}

bool UcxWorker::drain_and_arm() {
  for (int turn = 0; turn < kMostTurns; ++turn) {
    if (!progress() && ucp_worker_arm(worker_) != UCS_ERR_BUSY) return true;
  }
  return false;
}

void UcxWorker::wait(void* request) {
  if (!UCS_PTR_IS_PTR(request)) return;
  const Deadline deadline = Deadline::after(kCloseTimeout);
  while (ucp_request_check_status(request) == UCS_INPROGRESS && !deadline.passed()) {
    if (!progress()) std::this_thread::yield();
  }
  ucp_request_free(request);
}

// Always by force in the end: a worker must not be destroyed before its endpoints are.
void UcxWorker::close(ucp_ep_h endpoint, bool is_broken) {
  ucp_request_param_t params{};
  if (!is_broken) wait(ucp_ep_flush_nbx(endpoint, &params));
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  wait(ucp_ep_close_nbx(endpoint, &params));
}

void UcxWorker::drop(ucp_ep_h endpoint) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* const request = ucp_ep_close_nbx(endpoint, &params);
  if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);  // it goes once it has ended
}

}  // namespace tandem::net
