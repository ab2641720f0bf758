// Ranks that the library starts itself: as threads, or as processes forked from this one.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <system_error>
#include <thread>

#include "runtime/descriptor.h"
#include "runtime/local_socket.h"
#include "runtime/socket_bootstrap.h"
#include "runtime/thread_bootstrap.h"
#include "tandem/communicator.h"
#include "tandem/types.h"

// Present where the program is instrumented for coverage: a rank leaves by _exit, which would lose
// its counts.
extern "C" void __gcov_dump(void) __attribute__((weak));

namespace tandem {
namespace {

// Fits into a pipe, so that a child never waits for its parent to read.
constexpr std::size_t kMaxErrorBytes = 16384;

void check_num_ranks(int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw Error(ErrorCode::kInvalidArgument, "num_ranks is " + std::to_string(num_ranks) +
                                                 ", must be from 1 to " +
                                                 std::to_string(kMaxRanks));
  }
}

std::string text_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

void flush_output() {
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
}

// A child's whole life. Nothing of the parent's stack is unwound and no handler of its exit runs.
[[noreturn]] void run_child(pid_t parent, int error_pipe, int rank,
                            const std::function<Communicator(int)>& connect,
                            const std::function<int(const Communicator&)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it died before the line above
  int exit_code = 1;
  try {
    exit_code = body(connect(rank));
  } catch (...) {
    const std::string text = text_of(std::current_exception()).substr(0, kMaxErrorBytes);
    // If it cannot be written the exit code still tells.
    [[maybe_unused]] const ssize_t written = ::write(error_pipe, text.data(), text.size());
  }
  flush_output();
  if (__gcov_dump != nullptr) __gcov_dump();
  ::_exit(exit_code);
}

struct Child {
  pid_t process = -1;
  runtime::Descriptor error_pipe;
};

ProcessExit wait_for(const Child& child) {
  int status = 0;
  while (::waitpid(child.process, &status, 0) < 0) {
    if (errno != EINTR) {
      throw Error(ErrorCode::kResource,
                  std::string("cannot wait for a rank's process: ") + std::strerror(errno));
    }
  }
  ProcessExit exit;
  if (WIFEXITED(status)) exit.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) exit.signal = WTERMSIG(status);
  // All that will ever be in the pipe is there; what the child left running may still hold its end.
  char buffer[kMaxErrorBytes];
  const ssize_t length = ::read(child.error_pipe.get(), buffer, sizeof buffer);
  if (length > 0) exit.error.assign(buffer, static_cast<std::size_t>(length));
  return exit;
}

}  // namespace

void run_threads(int num_ranks, const std::function<void(const Communicator&)>& body,
                 const CommunicatorOptions& options) {
  check_num_ranks(num_ranks);
  const auto group = std::make_shared<runtime::ThreadGroup>(num_ranks);
  std::vector<std::exception_ptr> exceptions(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  threads.reserve(exceptions.size());
  const auto run_rank = [&](int rank) {
    // Outlives the body, so that peers hear of its exception before they hear that it left.
    const auto bootstrap = std::make_shared<runtime::ThreadBootstrap>(group, rank, options.timeout);
    try {
      body(Communicator(bootstrap));
    } catch (...) {
      exceptions[rank] = std::current_exception();
      group->leave(rank, "ended with an exception: " + text_of(exceptions[rank]));
    }
  };
  for (int rank = 0; rank < num_ranks; ++rank) {
    try {
      threads.emplace_back(run_rank, rank);
    } catch (const std::system_error& error) {
      for (int absent = rank; absent < num_ranks; ++absent) {
        group->leave(absent, "could not be started");
      }
      exceptions[rank] = std::make_exception_ptr(
          Error(ErrorCode::kResource,
                "cannot start a thread for rank " + std::to_string(rank) + ": " + error.what()));
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& exception : exceptions) {
    if (exception) std::rethrow_exception(exception);
  }
}

std::vector<ProcessExit> run_processes(int num_ranks,
                                       const std::function<int(const Communicator&)>& body,
                                       const CommunicatorOptions& options) {
  return run_processes(
      num_ranks,
      [&, name = runtime::random_rendezvous_name()](int rank) {
        return Communicator::connect(name, rank, num_ranks, options);
      },
      body);
}

std::vector<ProcessExit> run_processes(int num_ranks,
                                       const std::function<Communicator(int)>& connect,
                                       const std::function<int(const Communicator&)>& body) {
  check_num_ranks(num_ranks);
  const pid_t parent = ::getpid();
  std::vector<Child> children;
  children.reserve(static_cast<std::size_t>(num_ranks));
  flush_output();  // or every child would write what is buffered here once more

  std::string problem;
  for (int rank = 0; rank < num_ranks && problem.empty(); ++rank) {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      problem = std::string("cannot create a pipe: ") + std::strerror(errno);
      break;
    }
    runtime::Descriptor read_end(ends[0]);
    const runtime::Descriptor write_end(ends[1]);
    const pid_t process = ::fork();
    if (process == 0) {
      children.clear();  // the pipes of other ranks
      read_end.reset();
      run_child(parent, write_end.get(), rank, connect, body);
    }
    if (process < 0) {
      problem =
          "cannot start a process for rank " + std::to_string(rank) + ": " + std::strerror(errno);
      break;
    }
    children.push_back({.process = process, .error_pipe = std::move(read_end)});
  }
  if (!problem.empty()) {
    for (const Child& child : children) ::kill(child.process, SIGKILL);
  }
  std::vector<ProcessExit> exits;
  exits.reserve(children.size());
  for (const Child& child : children) exits.push_back(wait_for(child));
  if (!problem.empty()) throw Error(ErrorCode::kResource, problem);
  return exits;
}

}  // namespace tandem
