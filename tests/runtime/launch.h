// What tests of set-up share: ranks as threads or as processes, and errors as values.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::runtime {

enum class Launch { kThreads, kProcesses };

inline std::string name_of(Launch launch) {
  return launch == Launch::kThreads ? "Threads" : "Processes";
}

// How Google Test shows it.
inline void PrintTo(Launch launch, std::ostream* out) { *out << name_of(launch); }

// Inside a rank's body, where a failed EXPECT of a forked process would go unheard.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("violated: " + what);
}

// Runs `body` on ranks of either kind; a rank fails the test by throwing.
inline void run(Launch launch, int num_ranks, const std::function<void(const Communicator&)>& body,
                const CommunicatorOptions& options = {}) {
  if (launch == Launch::kThreads) {
    run_threads(num_ranks, body, options);
    return;
  }
  const auto exits = run_processes(
      num_ranks,
      [&body](const Communicator& communicator) {
        body(communicator);
        return 0;
      },
      options);
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
    EXPECT_EQ(exits[rank].exit_code, 0) << "rank " << rank;
    EXPECT_EQ(exits[rank].signal, 0) << "rank " << rank;
  }
}

// The Error that `action` throws, if it throws one.
inline std::optional<Error> error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

// Requires that `action` throws an Error of this code and peer whose text has all of `parts`.
inline void require_error(ErrorCode code, int peer, const std::vector<std::string>& parts,
                          const std::function<void()>& action) {
  const auto error = error_of(action);
  require(error.has_value(), "an error is thrown");
  require(error->code() == code, std::string("the error's code, of: ") + error->what());
  require(error->peer() == peer, std::string("the error's peer, of: ") + error->what());
  for (const auto& part : parts) {
    require(std::string(error->what()).find(part) != std::string::npos,
            "'" + part + "' is in: " + error->what());
  }
}

inline std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A rendezvous name that no other test, nor another run of this one, uses.
inline std::string unique_name() {
  static int counter = 0;
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->name()) + "-" + std::to_string(getpid()) + "-" +
         std::to_string(counter++);
}

// A counter that threads and forked processes share: how ranks that no longer share a communicator
// wait for each other.
class SharedCounter {
 public:
  SharedCounter()
      : count_(new (mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>(0)) {}
  ~SharedCounter() { munmap(count_, sizeof *count_); }
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;

  void add_one() const { ++*count_; }
  void wait_for(int count) const {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (*count_ < count) {
      require(std::chrono::steady_clock::now() < limit, "the other ranks get there");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::atomic<int>* count_;
};

// One attempt to join a rendezvous, and what came of it.
struct Attempt {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{60'000};
  std::chrono::milliseconds delay{0};
};

struct Outcome {
  std::optional<Communicator> communicator;
  std::optional<Error> error;
  std::chrono::milliseconds took{0};  // from the start of the attempt
};

// All attempts at the same time, each on a thread of this process.
inline std::vector<Outcome> connect_all(const std::string& name,
                                        const std::vector<Attempt>& attempts) {
  std::vector<Outcome> outcomes(attempts.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    threads.emplace_back([&, i] {
      const Attempt& attempt = attempts[i];
      std::this_thread::sleep_for(attempt.delay);
      const auto start = std::chrono::steady_clock::now();
      try {
        outcomes[i].communicator =
            Communicator::connect(name, attempt.rank, attempt.size, {.timeout = attempt.timeout});
      } catch (const Error& error) {
        outcomes[i].error = error;
      }
      outcomes[i].took = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::steady_clock::now() - start);
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

inline void expect_error(const Outcome& outcome, ErrorCode code, int peer,
                         const std::vector<std::string>& parts) {
  ASSERT_TRUE(outcome.error.has_value());
  EXPECT_EQ(outcome.error->code(), code) << outcome.error->what();
  EXPECT_EQ(outcome.error->peer(), peer) << outcome.error->what();
  for (const auto& part : parts) {
    EXPECT_NE(std::string(outcome.error->what()).find(part), std::string::npos)
        << "'" << part << "' in: " << outcome.error->what();
  }
}

}  // namespace tandem::runtime
