#include "support/world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "runtime/recorder.h"
#include "support/hosts.h"

namespace tandem::test {
namespace {

// cudaStreamPerThread, as the CUDA headers define it; this suite is built without them.
constexpr std::uintptr_t kPerThreadStream = 2;

// What one rank reports at most: the first failures tell, and the pipe between processes is narrow.
constexpr std::size_t kMaxReportBytes = 3000;

constexpr int kNumHosts = 3;

struct Died {};

std::string_view environment(const char* variable, std::string_view fallback) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == '\0' ? fallback : std::string_view(value);
}

std::string_view launch_under_test() {
  const std::string_view text = environment("TANDEM_TEST_LAUNCH", "threads");
  if (text == "threads" || text == "processes" || text == "apart" || text == "apart-threads" ||
      text == "hosts") {
    return text;
  }
  throw std::runtime_error(
      "TANDEM_TEST_LAUNCH must be threads, processes, apart, apart-threads or hosts");
}

// What a rank works with: the communicator that it was started with or, apart, another of the same
// ranks that share no memory.
Communicator set_apart(const Communicator& together, CommunicatorOptions options) {
  if (!launch_under_test().starts_with("apart")) return together;
  options.share_memory = false;
  return Communicator::from_all_gather(
      together.rank(), together.size(),
      [&](std::span<const std::byte> message) { return together.all_gather(message); }, options);
}

std::string run_body(Rank& rank, const std::function<void(Rank&)>& body) {
  try {
    rank.take_device();
    body(rank);
  } catch (const Died&) {
  } catch (const Error& error) {
    rank.fail("threw " + std::string(name(error.code())) + ": " + error.what());
  } catch (const std::exception& error) {
    rank.fail(std::string("threw ") + error.what());
  }
  return rank.failures().substr(0, kMaxReportBytes);
}

std::string run_in_threads(int num_ranks, const std::function<void(Rank&)>& body,
                           const CommunicatorOptions& options) {
  std::vector<std::string> reports(num_ranks);
  run_threads(
      num_ranks,
      [&](const Communicator& communicator) {
        Rank rank(set_apart(communicator, options));
        reports[rank.index()] = run_body(rank, body);
      },
      options);
  std::string all;
  for (const std::string& report : reports) all += report;
  return all;
}

std::string run_in_processes(int num_ranks, const std::function<void(Rank&)>& body,
                             const CommunicatorOptions& options, const std::vector<int>& may_die) {
  const auto was_meant_to_die = [&](std::size_t rank) {
    return std::find(may_die.begin(), may_die.end(), static_cast<int>(rank)) != may_die.end();
  };
  const auto run_rank = [&](const Communicator& communicator) {
    Rank rank(set_apart(communicator, options));
    const std::string report = run_body(rank, body);
    if (!report.empty()) throw std::runtime_error(report);
    return 0;
  };
  const std::vector<ProcessExit> exits =
      launch_under_test() == "hosts"
          ? run_processes(num_ranks, connect_on_hosts(num_ranks, kNumHosts, options), run_rank)
          : run_processes(num_ranks, run_rank, options);
  std::string all;
  for (std::size_t rank = 0; rank < exits.size(); ++rank) {
    const ProcessExit& exit = exits[rank];
    if (!exit.error.empty()) {
      all += exit.error;
    } else if (exit.signal == SIGKILL && was_meant_to_die(rank)) {
      continue;
    } else if (exit.exit_code != 0 || exit.signal != 0) {
      all += "rank " + std::to_string(rank) + ": exit code " + std::to_string(exit.exit_code) +
             ", signal " + std::to_string(exit.signal) + "\n";
    }
  }
  return all;
}

}  // namespace

Backend backend_under_test() {
  const std::string_view text = environment("TANDEM_TEST_BACKEND", "cpu");
  if (text == "cpu") return Backend::kCpu;
  if (text == "cuda") return Backend::kCuda;
  throw std::runtime_error("TANDEM_TEST_BACKEND must be cpu or cuda");
}

bool ranks_are_processes() { return !launch_under_test().ends_with("threads"); }

bool ranks_share_memory() {
  return launch_under_test() != "hosts" && !launch_under_test().starts_with("apart");
}

std::chrono::nanoseconds with_patience(std::chrono::nanoseconds timeout) {
  // What ranks decide across hosts passes through a process of each, which a busy machine may keep
  // from running.
  static const int factor =
      std::stoi(std::string(environment("TANDEM_TEST_PATIENCE", ranks_share_memory() ? "1" : "2")));
  return timeout * factor;
}

bool hosts_share_memory() { return launch_under_test() == "hosts"; }

int host_of(int rank) { return launch_under_test() == "hosts" ? rank % kNumHosts : 0; }

std::string host_address(int host) {
  return launch_under_test() == "hosts" ? tools::NetworkHosts::address(host) : "127.0.0.1";
}

void* Rank::stream() const {
  return backend_under_test() == Backend::kCuda ? reinterpret_cast<void*>(kPerThreadStream)
                                                : nullptr;
}

void Rank::take_device() {
  runtime::use_device(backend_under_test(), index_);
  if (backend_under_test() == Backend::kCuda) {
    scratch_ = Array(backend_under_test(), DType::kInt32, {1});
  }
}

void Rank::fence() const {
  if (backend_under_test() == Backend::kCuda && !free_) barrier();
}

void Rank::settle(Buffer& buffer) {
  if (backend_under_test() == Backend::kCuda) {
    // Copies wait for the stream to end.
    std::int32_t word = 0;
    copy(view_of(&word, {1}), scratch_, backend_under_test(), stream());
  }
  buffer.check();
}

void Rank::fail(const std::string& message) {
  failures_ += "rank " + std::to_string(index()) + ": " + message + "\n";
}

void Rank::die() const {
  if (ranks_are_processes()) std::raise(SIGKILL);
  throw Died();
}

bool Rank::expect(bool condition, const std::string& message) {
  if (!condition) fail(message);
  return condition;
}

ErrorInfo Rank::expect_error(ErrorCode code, const std::vector<std::string>& fragments,
                             const std::function<void()>& call) {
  const std::string wanted = "expected " + std::string(name(code));
  try {
    call();
  } catch (const Error& error) {
    if (error.code() != code) {
      fail(wanted + ", got " + std::string(name(error.code())) + ": " + error.what());
      return {};
    }
    for (const std::string& fragment : fragments) {
      expect(
          std::string_view(error.what()).find(fragment) != std::string_view::npos,
          "message of " + std::string(name(code)) + " lacks '" + fragment + "': " + error.what());
    }
    return error.info();
  }
  fail(wanted + ", but nothing was thrown");
  return {};
}

std::string failures_of_ranks(int num_ranks, const std::function<void(Rank&)>& body,
                              const WorldOptions& options) {
  const CommunicatorOptions communicator_options{.timeout = options.setup_timeout};
  return ranks_are_processes()
             ? run_in_processes(num_ranks, body, communicator_options, options.may_die)
             : run_in_threads(num_ranks, body, communicator_options);
}

void run_ranks(int num_ranks, const std::function<void(Rank&)>& body, const WorldOptions& options) {
  const std::string failures = failures_of_ranks(num_ranks, body, options);
  if (!failures.empty()) ADD_FAILURE() << failures;
}

}  // namespace tandem::test
