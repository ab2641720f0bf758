// World: runs a test's body once per rank, as threads or processes, on the backend under test.
//
// Both are parameters of the test program, so that one suite serves every backend:
//   TANDEM_TEST_BACKEND=cpu|cuda           (default cpu)
//   TANDEM_TEST_LAUNCH=threads|processes|apart|apart-threads|hosts   (default threads)
// and for programs that are slow, under a sanitizer of GPU kernels:
//   TANDEM_TEST_PATIENCE=N   timeouts that tests wait for are N times as long (1; without shared
//                            memory 2)
// apart: processes, or threads, that share no memory, as if each were on a host of its own; hosts:
// processes on three hosts, which are network namespaces (support/hosts.h).
//
// Google Test's assertions stay in the main thread of the parent process. A rank notes its failures
// through Rank::expect and its kin; run_ranks collects them from every thread or process and
// reports them as failures of the running test.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tandem/tandem.h"

namespace tandem::test {

[[nodiscard]] Backend backend_under_test();
[[nodiscard]] bool ranks_are_processes();
[[nodiscard]] bool ranks_share_memory();
[[nodiscard]] std::chrono::nanoseconds with_patience(std::chrono::nanoseconds timeout);
// Where ranks are on several hosts: those of one host do; the host of a rank; a host's address.
[[nodiscard]] bool hosts_share_memory();
[[nodiscard]] int host_of(int rank);
[[nodiscard]] std::string host_address(int host);

class Rank {
 public:
  explicit Rank(const Communicator& communicator) : Rank(communicator, communicator.rank()) {}
  // Plays rank `index` of a buffer, whichever it is of the communicator.
  Rank(const Communicator& communicator, int index) : communicator_(communicator), index_(index) {}

  // Ranks are spread over the devices there are; what this one allocates from now on is on its own.
  void take_device();

  [[nodiscard]] const Communicator& communicator() const { return communicator_; }
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int size() const { return communicator_.size(); }

  // The stream to give to every operation and copy. On a GPU: the stream of this thread, since
  // ranks of one process that shared a stream would queue behind each other.
  [[nodiscard]] void* stream() const;

  void barrier() const { communicator_.barrier(); }

  // From now on this rank's steps are not those of all: fence() is nothing.
  void run_freely() { free_ = true; }

  // A barrier on a GPU, nothing on CPUs (so that ranks run as freely as a user's would). Ranks that
  // are threads on one GPU must not allocate, copy or synchronise between one rank's launch and its
  // peers' launches.
  void fence() const;

  // On a GPU, waits for this rank's stream; then reports what has failed by throwing.
  void settle(Buffer& buffer);

  void fail(const std::string& message);
  bool expect(bool condition, const std::string& message);

  template <typename A, typename B>
  bool expect_equal(const A& actual, const B& expected, const std::string& what) {
    if (actual == expected) return true;
    std::ostringstream text;
    text << what << ": got " << actual << ", expected " << expected;
    fail(text.str());
    return false;
  }

  // Runs `call`, which must throw an Error with `code` whose message holds every fragment. Returns
  // its facts; those of a default ErrorInfo if nothing fitting was thrown (a failure is noted).
  ErrorInfo expect_error(ErrorCode code, const std::vector<std::string>& fragments,
                         const std::function<void()>& call);

  // Ends this rank here, for tests that say so (WorldOptions::may_die): a process by SIGKILL; a
  // thread by an exception that nobody but the world catches, so that all it does any more is to
  // destroy what it has.
  [[noreturn]] void die() const;

  [[nodiscard]] const std::string& failures() const { return failures_; }

 private:
  Communicator communicator_;
  int index_;
  std::string failures_;
  bool free_ = false;
  Array scratch_;  // of settle
};

struct WorldOptions {
  std::chrono::milliseconds setup_timeout{20'000};
  std::vector<int> may_die = {};  // ranks
};

// Runs `body` on every rank and returns all failures, one a line; empty if there were none.
[[nodiscard]] std::string failures_of_ranks(int num_ranks, const std::function<void(Rank&)>& body,
                                            const WorldOptions& options = {});

// The same, and reports the failures to Google Test.
void run_ranks(int num_ranks, const std::function<void(Rank&)>& body,
               const WorldOptions& options = {});

}  // namespace tandem::test
