#include "runtime/process_identity.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace tandem::runtime {
namespace {

// A child that sleeps until it is killed, and its identity.
struct Child {
  pid_t pid;
  ProcessIdentity identity;
};

Child make_child() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const ProcessIdentity own = own_process();
    if (::write(ends[1], &own, sizeof own) != sizeof own) ::_exit(1);
    for (;;) ::pause();
  }
  Child child{.pid = pid, .identity = {}};
  EXPECT_EQ(::read(ends[0], &child.identity, sizeof child.identity),
            ssize_t{sizeof child.identity});
  ::close(ends[0]);
  ::close(ends[1]);
  return child;
}

TEST(ProcessIdentity, OwnProcessIsThere) {
  const ProcessIdentity own = own_process();
  EXPECT_EQ(own.process, static_cast<std::uint64_t>(::getpid()));
  EXPECT_FALSE(is_gone(own));
}

TEST(ProcessIdentity, ProcessIsGoneOnceKilledWhetherReapedOrNot) {
  const Child child = make_child();
  EXPECT_NE(child.identity, own_process());
  EXPECT_FALSE(is_gone(child.identity));
  ::kill(child.pid, SIGSTOP);
  EXPECT_FALSE(is_gone(child.identity));  // stopped is not gone
  ::kill(child.pid, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(is_gone(child.identity));  // a zombie
  ASSERT_EQ(::waitpid(child.pid, nullptr, 0), child.pid);
  EXPECT_TRUE(is_gone(child.identity));
}

TEST(ProcessIdentity, NumberGivenToAnotherProcessIsAnotherProcess) {
  ProcessIdentity before = own_process();
  before.start_time -= 1;
  EXPECT_TRUE(is_gone(before));
}

TEST(ProcessIdentity, WhatCannotBeKnownIsNotGone) {
  EXPECT_FALSE(is_gone({}));
  ProcessIdentity elsewhere = own_process();
  elsewhere.process = 1 << 30;
  elsewhere.pid_namespace += 1;
  EXPECT_FALSE(is_gone(elsewhere));
}

}  // namespace
}  // namespace tandem::runtime
