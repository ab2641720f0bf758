// A UCX context with one worker: what both the rendezvous and the ranks' connections stand on. All
// failures become tandem::Error.
//
// Thread safety: one thread at a time, which is for the owner to see to.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <string>
#include <vector>

namespace tandem::net {

// Throws kResource, saying what could not be done and UCX's word for why.
void check(ucs_status_t status, const std::string& what);

class UcxWorker {
 public:
  UcxWorker();
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  [[nodiscard]] ucp_context_h context() const { return context_; }
  [[nodiscard]] ucp_worker_h get() const { return worker_; }
  [[nodiscard]] std::vector<std::byte> address() const;
  [[nodiscard]] std::size_t max_header_bytes() const;
  [[nodiscard]] int event_fd() const { return event_fd_; }

  // Handlers get `argument`; see ucp_worker_set_am_recv_handler.
  void set_handler(unsigned message, ucp_am_recv_callback_t handler, void* argument);

  // Advances what can be advanced; false if there was nothing.
  bool progress() { return ucp_worker_progress(worker_) != 0; }
  // Advances until event_fd() will tell of whatever comes next; false if there is no end to it.
  [[nodiscard]] bool drain_and_arm();

  // Closes an endpoint: at once if it is broken, else when all has left, or after a second.
  void close(ucp_ep_h endpoint, bool is_broken);
  // The same, whatever has not left, and does not wait.
  void drop(ucp_ep_h endpoint);

 private:
  // For the end of a request, at most a second.
  void wait(void* request);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
};

}  // namespace tandem::net
