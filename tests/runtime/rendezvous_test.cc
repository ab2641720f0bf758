// Ranks that meet under a name: who may come, who is missed, what contradicts, and what a stranger
// on the socket can do. Ranks are threads here that connect through real sockets.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>

#include "runtime/bootstrap.h"
#include "runtime/descriptor.h"
#include "runtime/launch.h"
#include "runtime/raw_socket.h"
#include "runtime/socket_channel.h"

namespace tandem::runtime {
namespace {

using std::chrono::milliseconds;

// Connects to a rendezvous like anybody could, as soon as somebody listens.
Descriptor connect_raw(const std::string& name) {
  for (;;) {
    if (Descriptor raw = try_connect_raw(name)) return raw;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void send_raw(const Descriptor& raw, const std::string& bytes) {
  EXPECT_EQ(send(raw.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

std::string frame_of(FrameKind kind, const std::string& payload, std::uint64_t length) {
  const FrameHeader header{.magic = kFrameMagic,
                           .kind = kind,
                           .exchange = 0,
                           .rank = 0,
                           .round = 0,
                           .deadline_ns = Deadline::never().nanoseconds(),
                           .length = length};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

std::string hello_of(std::uint32_t version, std::int32_t rank, std::int32_t size) {
  std::string payload(16, '\0');
  std::memcpy(payload.data(), &version, 4);
  std::memcpy(payload.data() + 4, &rank, 4);
  std::memcpy(payload.data() + 8, &size, 4);
  return frame_of(FrameKind::kHello, payload, payload.size());
}

// Reads until the other side closes.
std::string read_all(const Descriptor& raw) {
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = recv(raw.get(), buffer, sizeof buffer, 0)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  return text;
}

TEST(Rendezvous, RanksOfOneProcessShareIt) {
  for (const int size : {1, 2, 3, 5, 8, 16}) {
    std::vector<Attempt> attempts;
    for (int rank = size - 1; rank >= 0; --rank) attempts.push_back({.rank = rank, .size = size});
    const auto outcomes = connect_all(unique_name(), attempts);
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.communicator) << outcome.error->what();
      EXPECT_TRUE(outcome.communicator->bootstrap()->in_one_process());
      EXPECT_EQ(outcome.communicator->size(), size);
    }
    std::vector<std::thread> threads;
    for (const auto& outcome : outcomes) {
      threads.emplace_back([&outcome] {
        const auto& communicator = *outcome.communicator;
        auto own = std::make_shared<int>(communicator.rank());
        const auto all = communicator.bootstrap()->all_gather_objects(own);
        for (int rank = 0; rank < communicator.size(); ++rank) {
          EXPECT_EQ(*std::static_pointer_cast<int>(all[rank]), rank);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(Rendezvous, ThreadsOfSeveralProcessesMeet) {
  const std::string name = unique_name();
  run(Launch::kProcesses, 2, [&](const Communicator& outer) {
    // Two ranks on each side.
    const int first = 2 * outer.rank();
    const auto outcomes =
        connect_all(name, {{.rank = first, .size = 4}, {.rank = first + 1, .size = 4}});
    std::atomic<int> num_right = 0;
    std::vector<std::thread> threads;
    for (const auto& outcome : outcomes) {
      require(outcome.communicator.has_value(), "connected");
      require(!outcome.communicator->bootstrap()->in_one_process(), "not one process");
      threads.emplace_back([&] {
        const auto all = outcome.communicator->all_gather(
            bytes_of(std::to_string(outcome.communicator->rank())));
        if (text_of(all[0]) + text_of(all[1]) + text_of(all[2]) + text_of(all[3]) == "0123") {
          ++num_right;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    require(num_right == 2, "all messages on both ranks");
  });
}

TEST(Rendezvous, OneNameServesOneGroupAfterAnother) {
  const std::string name = unique_name();
  run(Launch::kProcesses, 3, [&](const Communicator& outer) {
    std::vector<Communicator> kept;
    for (int round = 0; round < 30; ++round) {
      kept.push_back(Communicator::connect(name, outer.rank(), outer.size()));
      if (round % 3 == 0) kept.back().barrier();
    }
    for (const auto& communicator : kept) communicator.barrier();
  });
}

TEST(Rendezvous, LongAndOddNamesWork) {
  for (const std::string& name :
       {std::string(5000, 'x') + std::to_string(getpid()), unique_name() + " /\n\xff\x01 ",
        unique_name() + std::string(1, '\0') + "after a zero"}) {
    const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}});
    EXPECT_TRUE(outcomes[0].communicator && outcomes[1].communicator);
  }
}

TEST(Rendezvous, LongNamesThatDifferLateAreDifferent) {
  const std::string common = std::string(200, 'y') + std::to_string(getpid());
  const auto outcomes =
      connect_all(common + "a", {{.rank = 0, .size = 2, .timeout = milliseconds(200)}});
  std::vector<Outcome> other;
  expect_error(outcomes[0], ErrorCode::kTimeout, 1, {"rank 1 of 2"});
  std::thread late([&] {
    other = connect_all(common + "b", {{.rank = 1, .size = 2, .timeout = milliseconds(300)}});
  });
  const auto first =
      connect_all(common + "a", {{.rank = 0, .size = 2, .timeout = milliseconds(300)}});
  late.join();
  EXPECT_TRUE(first[0].error && other[0].error);
}

TEST(Rendezvous, MissingRanksAreNamedToEverybodyInTime) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 0, .size = 5, .timeout = milliseconds(2000)},
                                  {.rank = 2, .size = 5, .timeout = milliseconds(2000)},
                                  {.rank = 4, .size = 5, .timeout = milliseconds(2000)}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kTimeout, 1, {"ranks 1 and 3 of 5 did not come", "2000"});
    EXPECT_EQ(outcome.error->info().phase, Phase::kSetup);
    EXPECT_EQ(outcome.error->info().limit, milliseconds(2000));
    EXPECT_LT(outcome.took, milliseconds(30'000));
  }
  // Who came first, whose time it was that ran out.
  const auto first = std::ranges::max_element(outcomes, {}, &Outcome::took);
  EXPECT_GE(first->took, milliseconds(1900));
}

TEST(Rendezvous, TheShortestTimeoutCountsForAll) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 0, .size = 3, .timeout = milliseconds(60'000)},
                                  {.rank = 1, .size = 3, .timeout = milliseconds(2000)}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kTimeout, 2, {"rank 2 of 3"});
    EXPECT_LT(outcome.took, milliseconds(30'000));
  }
}

TEST(Rendezvous, WithoutRankZeroTheOthersMissIt) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 1, .size = 3, .timeout = milliseconds(300)},
                                  {.rank = 2, .size = 3, .timeout = milliseconds(300)}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kTimeout, 0, {"rank 0 of 3 did not come"});
  }
}

TEST(Rendezvous, DifferentSizesAreReportedToAll) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 0, .size = 3},
                                  {.rank = 1, .size = 4},
                                  {.rank = 2, .size = 3, .delay = milliseconds(100)}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kInvalidArgument, 1,
                 {"rank 1 says that there are 4 ranks, rank 0 says 3"});
    EXPECT_LT(outcome.took, milliseconds(30'000));
  }
}

TEST(Rendezvous, OneRankTwiceIsReportedToAll) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 0, .size = 3},
                                  {.rank = 1, .size = 3},
                                  {.rank = 1, .size = 3, .delay = milliseconds(100)}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kInvalidArgument, 1, {"two processes", "rank 1"});
  }
}

TEST(Rendezvous, RankZeroTwiceIsReportedToAll) {
  const auto outcomes =
      connect_all(unique_name(), {{.rank = 0, .size = 3},
                                  {.rank = 0, .size = 3, .delay = milliseconds(100)},
                                  {.rank = 2, .size = 3}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kInvalidArgument, 0, {"two processes", "rank 0"});
  }
}

TEST(Rendezvous, ArgumentsOutOfRangeAreRefusedAtOnce) {
  const auto code_of = [](const std::string& name, int rank, int size, milliseconds timeout) {
    const auto error =
        error_of([&] { Communicator::connect(name, rank, size, {.timeout = timeout}); });
    return error ? error->code() : ErrorCode::kOrder;
  };
  const milliseconds timeout(1000);
  EXPECT_EQ(code_of("x", -1, 2, timeout), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("x", 2, 2, timeout), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("x", 0, 0, timeout), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("x", 0, kMaxRanks + 1, timeout), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("", 0, 2, timeout), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("x", 0, 2, milliseconds(0)), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of("x", 0, 2, milliseconds(-5)), ErrorCode::kInvalidArgument);
}

TEST(Rendezvous, AnInfiniteTimeoutWaits) {
  const auto outcomes = connect_all(
      unique_name(),
      {{.rank = 0, .size = 2, .timeout = milliseconds::max()},
       {.rank = 1, .size = 2, .timeout = milliseconds::max(), .delay = milliseconds(50)}});
  ASSERT_TRUE(outcomes[0].communicator && outcomes[1].communicator);
  std::thread other([&] { outcomes[1].communicator->barrier(); });
  outcomes[0].communicator->barrier();
  other.join();
}

// What strangers of the same user may send to a rendezvous that waits for its second rank.
TEST(Rendezvous, StrangersAreRefusedAndTheRanksStillMeet) {
  const std::string name = unique_name();
  std::thread strangers([&] {
    std::vector<Descriptor> silent;
    for (int i = 0; i < 20; ++i) silent.push_back(connect_raw(name));
    for (const std::string& garbage :
         {std::string("GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything\r\n\r\n"),
          std::string(1000, '\xff'), frame_of(FrameKind::kHello, "", ~std::uint64_t{0}),
          frame_of(FrameKind::kHello, "short", 5),
          frame_of(FrameKind::kWelcome, std::string(8, 'w'), 8),
          frame_of(static_cast<FrameKind>(77), "", 0)}) {
      const Descriptor raw = connect_raw(name);
      send_raw(raw, garbage);
      // Told that it is no rank, then left.
      EXPECT_NE(read_all(raw).find("no message that ranks of Tandem greet with"),
                std::string::npos);
    }
    // One that leaves in mid-sentence.
    send_raw(connect_raw(name), hello_of(kProtocolVersion, 1, 2).substr(0, 45));
    const auto late = connect_all(name, {{.rank = 1, .size = 2}});
    EXPECT_TRUE(late[0].communicator);
  });
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}});
  EXPECT_TRUE(outcomes[0].communicator) << outcomes[0].error->what();
  strangers.join();
}

TEST(Rendezvous, AnotherVersionIsReported) {
  const std::string name = unique_name();
  std::thread stranger([&] {
    const Descriptor raw = connect_raw(name);
    send_raw(raw, hello_of(kProtocolVersion + 1, 1, 2));
    EXPECT_NE(read_all(raw).find("version"), std::string::npos);
  });
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}});
  expect_error(outcomes[0], ErrorCode::kMismatch, 1, {"speaks version 2", "version 1"});
  stranger.join();
}

TEST(Rendezvous, ARankOutOfRangeIsReported) {
  for (const int rank : {2, -1, 1 << 30}) {
    const std::string name = unique_name();
    std::thread stranger([&] {
      const Descriptor raw = connect_raw(name);
      send_raw(raw, hello_of(kProtocolVersion, rank, 2));
      EXPECT_NE(read_all(raw).find("outside [0, 2)"), std::string::npos);
    });
    const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}});
    expect_error(outcomes[0], ErrorCode::kInvalidArgument, rank,
                 {"rank " + std::to_string(rank) + " is outside [0, 2)"});
    stranger.join();
  }
}

TEST(Rendezvous, ARankThatDiesWhileOthersComeIsNamed) {
  const std::string name = unique_name();
  std::thread stranger([&] {
    const Descriptor raw = connect_raw(name);
    send_raw(raw, hello_of(kProtocolVersion, 1, 3));
    char accepted[sizeof(FrameHeader)];
    EXPECT_EQ(recv(raw.get(), accepted, sizeof accepted, MSG_WAITALL),
              static_cast<ssize_t>(sizeof accepted));
  });
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 3}});
  stranger.join();
  expect_error(outcomes[0], ErrorCode::kPeerLost, 1, {"rank 1 (process", "left the rendezvous"});
}

// After the welcome: rank 1 turns into something that speaks no protocol.
TEST(Rendezvous, AMemberThatTalksNonsenseIsLost) {
  struct Nonsense {
    std::string bytes;
    std::string part;
  };
  for (const Nonsense& nonsense :
       {Nonsense{std::string(100, 'z'), "no message of Tandem"},
        Nonsense{frame_of(FrameKind::kContribution, "", kMaxMessageBytes + 1),
                 "no message of Tandem"},
        Nonsense{frame_of(FrameKind::kContribution, "", 0), "out of turn"},  // of round 0
        Nonsense{frame_of(FrameKind::kFailure, "?", 1), "out of turn"}}) {
    const std::string name = unique_name();
    // In another process, lest the two share a group in memory.
    const pid_t child = fork();
    if (child == 0) {
      const Descriptor raw = connect_raw(name);
      const std::string hello = hello_of(kProtocolVersion, 1, 2);
      bool sent = send(raw.get(), hello.data(), hello.size(), MSG_NOSIGNAL) > 0;
      char answer[2 * sizeof(FrameHeader) + 8];  // accepted, welcome
      sent = sent && recv(raw.get(), answer, sizeof answer, MSG_WAITALL) > 0;
      sent =
          sent && send(raw.get(), nonsense.bytes.data(), nonsense.bytes.size(), MSG_NOSIGNAL) > 0;
      static_cast<void>(read_all(raw));
      _exit(sent ? 0 : 1);
    }
    {
      const Communicator communicator = Communicator::connect(name, 0, 2);
      const auto error = error_of([&] { communicator.barrier(); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kPeerLost) << error->what();
      EXPECT_EQ(error->peer(), 1);
      EXPECT_NE(std::string(error->what()).find(nonsense.part), std::string::npos) << error->what();
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(Rendezvous, TheNameIsFreeAndGoneOnceAllHaveCome) {
  const std::string name = unique_name();
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}});
  ASSERT_TRUE(outcomes[0].communicator && outcomes[1].communicator);
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    EXPECT_EQ(line.find(name), std::string::npos) << line;
  }
}

// Root alone can become another user; everywhere else the kernel's answer to SO_PEERCRED is taken
// on trust.
TEST(Rendezvous, AnotherUserIsKeptOut) {
  if (geteuid() != 0) return;
  const std::string name = unique_name();
  const pid_t child = fork();
  if (child == 0) {
    const RawAddress address(name);
    if (setuid(65534) != 0) _exit(2);
    for (int attempt = 0; attempt < 60'000; ++attempt) {
      const Descriptor raw = raw_socket();
      if (connect(raw.get(), address.get(), address.length) == 0) {
        const std::string hello = hello_of(kProtocolVersion, 1, 2);
        static_cast<void>(send(raw.get(), hello.data(), hello.size(), MSG_NOSIGNAL));
        char byte = 0;
        _exit(recv(raw.get(), &byte, 1, 0) <= 0 ? 0 : 1);  // closed without a word
      }
      usleep(1000);
    }
    _exit(3);
  }
  std::thread member([&] {  // the place is free for it
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    const auto late = connect_all(name, {{.rank = 1, .size = 2, .timeout = milliseconds(20'000)}});
    EXPECT_TRUE(late[0].communicator);
  });
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}});
  member.join();
  EXPECT_TRUE(outcomes[0].communicator) << outcomes[0].error->what();
}

TEST(Rendezvous, ANameHeldByAnotherUserIsRefused) {
  if (geteuid() != 0) return;
  const std::string name = unique_name();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const RawAddress address(name);
    if (setuid(65534) != 0) _exit(2);
    const Descriptor raw = raw_socket();
    if (bind(raw.get(), address.get(), address.length) != 0) _exit(3);
    if (listen(raw.get(), 8) != 0) _exit(4);
    static_cast<void>(write(ready[1], "", 1));
    for (;;) pause();
  }
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}});
  for (const auto& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kInvalidArgument, -1, {"held by another user (uid 65534)"});
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

}  // namespace
}  // namespace tandem::runtime
