#include "common/network_hosts.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace tandem::tools {
namespace {

// A new network namespace, which lives while its descriptor does. A namespace belongs to a thread.
int make_namespace() {
  int fd = -1;
  int problem = 0;
  std::thread([&] {
    if (unshare(CLONE_NEWNET) == 0) fd = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (fd < 0) problem = errno;
  }).join();
  if (fd < 0) {
    throw std::runtime_error(
        fmt::format("hosts need network namespaces, which this process cannot make: {}{}",
                    std::strerror(problem), problem == EPERM ? " (run it as root)" : ""));
  }
  return fd;
}

// A nameless file with `text` in it.
int file_of(std::string_view text) {
  const int fd = memfd_create("tandem-input", MFD_CLOEXEC);
  if (fd < 0 || write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw std::runtime_error(fmt::format("memfd: {}", std::strerror(errno)));
  }
  lseek(fd, 0, SEEK_SET);
  return fd;
}

std::string contents(int fd) {
  std::string text(std::size_t{1} << 17, '\0');
  const ssize_t length = pread(fd, text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return text;
}

}  // namespace

NetworkHosts::NetworkHosts(int num_hosts) {
  switch_ = make_namespace();
  for (int host = 0; host < num_hosts; ++host) hosts_.push_back(make_namespace());
  std::string wiring = "link add bridge type bridge\nlink set bridge up\n";
  for (int host = 0; host < num_hosts; ++host) {
    wiring += fmt::format(
        "link add port{0} type veth peer name eth0 netns /proc/{1}/fd/{2}\n"
        "link set port{0} master bridge up\n",
        host, getpid(), hosts_[host]);
  }
  run(kSwitch, {"ip", "-batch", "-"}, wiring);
  for (int host = 0; host < num_hosts; ++host) {
    run(host, {"ip", "-batch", "-"},
        fmt::format("link set lo up\naddress add {}/24 dev eth0\n", address(host)));
    set_link(host, true);
  }
  await_forwarding(num_hosts);
}

void NetworkHosts::await_forwarding(int num_ports) const {
  constexpr std::string_view kForwarding = "state forwarding";
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (;;) {
    const std::string links = run(kSwitch, {"ip", "-details", "link", "show"});
    int num_forwarding = 0;
    for (std::size_t at = 0; (at = links.find(kForwarding, at)) != std::string::npos; ++at) {
      ++num_forwarding;
    }
    if (num_forwarding >= num_ports) return;
    if (std::chrono::steady_clock::now() > limit) {
      throw std::runtime_error("the bridge between hosts does not come up");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

NetworkHosts::~NetworkHosts() {
  for (const int host : hosts_) close(host);
  close(switch_);
}

std::string NetworkHosts::address(int host) { return fmt::format("10.99.0.{}", host + 1); }

void NetworkHosts::enter(int host) const {
  if (setns(descriptor(host), CLONE_NEWNET) != 0) {
    throw std::runtime_error(fmt::format("cannot move to host {}: {}", host, std::strerror(errno)));
  }
}

void NetworkHosts::set_link(int host, bool up) const {
  run(host, {"ip", "link", "set", "eth0", up ? "up" : "down"});
  if (!up) return;
  // What is common between hosts; bbr is slow and erratic on a veth. A kernel without it has its
  // reasons.
  try {
    run(host, {"ip", "route", "replace", "10.99.0.0/24", "dev", "eth0", "src", address(host),
               "congctl", "cubic"});
  } catch (const std::runtime_error&) {
  }
}

std::string NetworkHosts::run(int host, const std::vector<std::string>& command,
                              std::string_view input) const {
  const int in = file_of(input);
  const int out = file_of("");
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, out, STDERR_FILENO);
  // Spawned, not forked: a fork's child that allocates waits for ever if another thread just did.
  // The thread is there to be on that host, which the command then is too.
  int problem = 0;
  int status = 0;
  std::thread([&] {
    pid_t child = -1;
    problem = setns(descriptor(host), CLONE_NEWNET) != 0 ? errno : 0;
    if (problem == 0) {
      problem = posix_spawnp(&child, arguments[0], &files, nullptr, arguments.data(), environ);
    }
    while (problem == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }).join();
  posix_spawn_file_actions_destroy(&files);
  const std::string said = contents(out);
  close(in);
  close(out);
  if (problem == ENOENT) {
    throw std::runtime_error(fmt::format("the command '{}' is missing", command.front()));
  }
  if (problem != 0 || status != 0) {
    throw std::runtime_error(fmt::format("'{}' failed: {}", fmt::join(command, " "),
                                         problem != 0 ? std::strerror(problem) : said));
  }
  return said;
}

}  // namespace tandem::tools
