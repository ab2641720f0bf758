#include "support/delayed_link.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/descriptor.h"

namespace tandem::test {
namespace {

using Clock = std::chrono::steady_clock;
using runtime::Descriptor;

constexpr const char* kDevices[] = {"near", "far"};

// The end of a TAP device that this makes where the calling thread is.
Descriptor make_device(const char* name) {
  Descriptor end(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  if (!end || ioctl(end.get(), TUNSETIFF, &request) != 0) {
    throw std::runtime_error(fmt::format("cannot make a TAP device: {}", std::strerror(errno)));
  }
  return end;
}

// What comes in at one end goes out at the other when its time has come. For ever.
[[noreturn]] void carry(const Descriptor (&ends)[2], std::chrono::milliseconds delay) {
  struct Frame {
    Clock::time_point due;
    int end;
    std::vector<std::byte> bytes;
  };
  std::deque<Frame> frames;  // in the order of their times
  std::array<std::byte, 1 << 16> space;
  pollfd entries[] = {{.fd = ends[0].get(), .events = POLLIN, .revents = 0},
                      {.fd = ends[1].get(), .events = POLLIN, .revents = 0}};
  for (;;) {
    for (; !frames.empty() && frames.front().due <= Clock::now(); frames.pop_front()) {
      const Frame& frame = frames.front();
      // A frame that its device does not take is lost, as on any link.
      static_cast<void>(!write(ends[frame.end].get(), frame.bytes.data(), frame.bytes.size()));
    }
    timespec left{};
    if (!frames.empty()) {
      const auto time = std::max(frames.front().due - Clock::now(), Clock::duration::zero());
      left = {.tv_sec = time / std::chrono::seconds(1),
              .tv_nsec = static_cast<long>((time % std::chrono::seconds(1)).count())};
    }
    ppoll(entries, 2, frames.empty() ? nullptr : &left, nullptr);
    for (int end = 0; end < 2; ++end) {
      for (ssize_t size = 0; (size = read(ends[end].get(), space.data(), space.size())) > 0;) {
        frames.push_back({.due = Clock::now() + delay,
                          .end = 1 - end,
                          .bytes = {space.begin(), space.begin() + size}});
      }
    }
  }
}

}  // namespace

DelayedLink::DelayedLink(const tools::NetworkHosts& hosts, int host,
                         std::chrono::milliseconds delay)
    : hosts_(hosts), host_(host) {
  Descriptor ends[2];
  std::exception_ptr problem;
  std::thread([&] {  // which moves
    try {
      hosts.enter(tools::NetworkHosts::kSwitch);
      for (int end = 0; end < 2; ++end) ends[end] = make_device(kDevices[end]);
    } catch (...) {
      problem = std::current_exception();
    }
  })
      .join();
  if (problem) std::rethrow_exception(problem);
  hosts.run(tools::NetworkHosts::kSwitch, {"ip", "-batch", "-"},
            fmt::format("link add delay type bridge\n"
                        "link set delay up\n"
                        "link set port{} master delay\n"
                        "link set near master delay up\n"
                        "link set far master bridge up\n",
                        host));
  hosts.await_forwarding(hosts.size() + 2);
  const pid_t parent = getpid();
  carrier_ = fork();
  if (carrier_ < 0) {
    throw std::runtime_error(fmt::format("cannot carry frames: {}", std::strerror(errno)));
  }
  if (carrier_ > 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it died before the line above
  carry(ends, delay);
}

DelayedLink::~DelayedLink() {
  hosts_.run(tools::NetworkHosts::kSwitch, {"ip", "-batch", "-"},
             fmt::format("link set port{} master bridge\nlink del delay\n", host_));
  kill(carrier_, SIGKILL);  // and its devices go with it
  waitpid(carrier_, nullptr, 0);
  hosts_.await_forwarding(hosts_.size());
}

}  // namespace tandem::test
