#include "backend/net/unused_port.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <set>

namespace tandem::test {
namespace {

using Ports = std::array<int, 15>;

Ports draw() {
  Ports ports;
  for (int& port : ports) port = unused_port();
  return ports;
}

// Tests run at the same time, and listen long after they have drawn.
TEST(UnusedPort, NoTwoProcessesGetTheSame) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  static_cast<void>(unused_port());  // both go on from here
  const pid_t child = ::fork();
  if (child == 0) {
    const Ports ports = draw();
    if (::write(ends[1], ports.data(), sizeof ports) != sizeof ports) ::_exit(1);
    for (;;) ::pause();
  }
  Ports theirs{};
  EXPECT_EQ(::read(ends[0], theirs.data(), sizeof theirs), ssize_t{sizeof theirs});
  const Ports ours = draw();
  std::set<int> all(theirs.begin(), theirs.end());
  all.insert(ours.begin(), ours.end());
  EXPECT_EQ(all.size(), theirs.size() + ours.size());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace tandem::test
