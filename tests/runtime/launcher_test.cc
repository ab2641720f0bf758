// Ranks that the library starts: what comes back from them, and what never stays behind.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <set>

#include "runtime/descriptor.h"
#include "runtime/launch.h"

namespace tandem::runtime {
namespace {

TEST(RunThreads, RunsEveryRankOnItsOwnThread) {
  for (const int size : {1, 2, 3, 5, 8, 16}) {
    std::vector<std::thread::id> threads(static_cast<std::size_t>(size));
    run_threads(size, [&](const Communicator& communicator) {
      EXPECT_EQ(communicator.size(), size);
      threads[communicator.rank()] = std::this_thread::get_id();
    });
    EXPECT_EQ(std::set<std::thread::id>(threads.begin(), threads.end()).size(),
              static_cast<std::size_t>(size));
  }
}

TEST(RunThreads, RethrowsTheExceptionOfTheLowestRank) {
  std::atomic<int> num_ended = 0;
  try {
    run_threads(4, [&](const Communicator& communicator) {
      ++num_ended;
      if (communicator.rank() >= 2) {
        throw std::runtime_error("from rank " + std::to_string(communicator.rank()));
      }
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "from rank 2");
  }
  EXPECT_EQ(num_ended, 4);
}

TEST(RunThreads, AndRunProcessesRefuseANumberOfRanksOutOfRange) {
  for (const int size : {0, -1, kMaxRanks + 1}) {
    const auto threads = error_of([size] { run_threads(size, [](const Communicator&) {}); });
    const auto processes =
        error_of([size] { run_processes(size, [](const Communicator&) { return 0; }); });
    ASSERT_TRUE(threads && processes);
    EXPECT_EQ(threads->code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(processes->code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(threads->what()).find(std::to_string(size)), std::string::npos);
  }
}

TEST(RunThreads, ACommunicatorMayOutliveItsThread) {
  std::vector<std::optional<Communicator>> kept(2);
  run_threads(2,
              [&](const Communicator& communicator) { kept[communicator.rank()] = communicator; });
  std::thread other([&] { kept[1]->barrier(); });
  kept[0]->barrier();
  other.join();
}

TEST(RunProcesses, ReportsExitCodesSignalsAndExceptions) {
  const auto exits = run_processes(6, [](const Communicator& communicator) {
    switch (communicator.rank()) {
      case 0:
        return 0;
      case 1:
        return 42;
      case 2:
        throw std::runtime_error("body's own words");
      case 3:
        raise(SIGKILL);
        return 0;
      case 4:
        throw 5;
      default:
        _exit(7);
    }
  });
  ASSERT_EQ(exits.size(), 6U);
  EXPECT_EQ(exits[0].exit_code, 0);
  EXPECT_EQ(exits[0].error, "");
  EXPECT_EQ(exits[1].exit_code, 42);
  EXPECT_EQ(exits[2].exit_code, 1);
  EXPECT_EQ(exits[2].error, "body's own words");
  EXPECT_EQ(exits[3].signal, SIGKILL);
  EXPECT_EQ(exits[4].exit_code, 1);
  EXPECT_NE(exits[4].error, "");
  EXPECT_EQ(exits[5].exit_code, 7);
}

TEST(RunProcesses, ALongExceptionTextIsCutNotStuck) {
  const auto exits = run_processes(
      1, [](const Communicator&) -> int { throw std::runtime_error(std::string(1 << 20, 'e')); });
  EXPECT_GT(exits[0].error.size(), 1000U);
  EXPECT_LT(exits[0].error.size(), 100'000U);
}

TEST(RunProcesses, RanksAreProcessesThatMeet) {
  for (const int size : {1, 2, 3, 5, 8, 16}) {
    const pid_t parent = getpid();
    const auto exits = run_processes(size, [&](const Communicator& communicator) {
      require(communicator.size() == size, "size");
      require(getppid() == parent, "a child of the caller");
      const auto all = communicator.all_gather(bytes_of(std::to_string(getpid())));
      const std::set<std::vector<std::byte>> distinct(all.begin(), all.end());
      require(static_cast<int>(distinct.size()) == size, "a process each");
      return 0;
    });
    for (const auto& exit : exits) EXPECT_EQ(exit.error, "");
  }
}

TEST(RunProcesses, AChildOfTheBodyDoesNotHoldUpTheEnd) {
  // It inherits the pipe that exceptions come back through, and lives on.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Descriptor read_end(ends[0]);
  const Descriptor write_end(ends[1]);
  const auto exits = run_processes(1, [&](const Communicator&) {
    const pid_t child = fork();
    if (child == 0) {
      for (;;) pause();
    }
    return write(write_end.get(), &child, sizeof child) == sizeof child ? 3 : 1;
  });
  EXPECT_EQ(exits[0].exit_code, 3);
  pid_t child = 0;
  ASSERT_EQ(read(read_end.get(), &child, sizeof child), static_cast<ssize_t>(sizeof child));
  EXPECT_EQ(kill(child, SIGKILL), 0);
}

// Output that was buffered before the fork appears once, and what a rank printed is not lost.
TEST(RunProcesses, OutputIsNeitherDoubledNorLost) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  const pid_t child = fork();
  if (child == 0) {
    dup2(write_end.get(), STDOUT_FILENO);  // a pipe: fully buffered
    std::printf("before;");
    std::cout << "stream;";
    const auto exits = run_processes(3, [](const Communicator& communicator) {
      std::printf("rank;");
      std::cout << (communicator.rank() == 1 ? "one;" : "");
      if (communicator.rank() == 2) throw std::runtime_error("ends by exception");
      return 0;
    });
    std::printf("after;");
    std::fflush(stdout);
    _exit(exits.size() == 3 ? 0 : 1);
  }
  write_end.reset();
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(read_end.get(), buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const auto count = [&text](const std::string& word) {
    int n = 0;
    for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("before;"), 1) << text;
  EXPECT_EQ(count("stream;"), 1) << text;
  EXPECT_EQ(count("rank;"), 3) << text;
  EXPECT_EQ(count("one;"), 1) << text;
  EXPECT_EQ(count("after;"), 1) << text;
}

TEST(RunProcesses, ChildrenDieWithTheCaller) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  const pid_t caller = fork();
  if (caller == 0) {
    static_cast<void>(run_processes(3, [&](const Communicator& communicator) {
      communicator.barrier();
      static_cast<void>(write(write_end.get(), "r", 1));
      for (;;) pause();
      return 0;
    }));
    _exit(0);
  }
  write_end.reset();
  char buffer[3];
  for (int i = 0; i < 3; ++i) ASSERT_EQ(read(read_end.get(), buffer, 1), 1);
  kill(caller, SIGKILL);
  waitpid(caller, nullptr, 0);
  // The pipe's last writer is gone when all ranks are.
  pollfd entry{.fd = read_end.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&entry, 1, 20'000), 1);
  EXPECT_EQ(read(read_end.get(), buffer, 1), 0);
}

TEST(RunProcesses, LeavesOtherChildrenOfTheCallerAlone) {
  const pid_t own = fork();
  if (own == 0) _exit(9);
  const auto exits = run_processes(2, [](const Communicator& communicator) {
    communicator.barrier();
    return 0;
  });
  EXPECT_EQ(exits[1].exit_code, 0);
  int status = 0;
  EXPECT_EQ(waitpid(own, &status, 0), own);
  EXPECT_EQ(WEXITSTATUS(status), 9);
}

}  // namespace
}  // namespace tandem::runtime
