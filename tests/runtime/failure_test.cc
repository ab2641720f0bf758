// What ranks learn when one of them dies, stops, leaves or throws during set-up.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <climits>
#include <cstring>

#include "runtime/bootstrap.h"
#include "runtime/failure.h"
#include "runtime/launch.h"

namespace tandem::runtime {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Of tests in which somebody is missed. The others come in that time, and have met in it.
constexpr milliseconds kTimeout(2000);

TEST(ListRanks, NamesFewAndCountsMany) {
  const std::vector<int> one = {3};
  const std::vector<int> two = {0, 4};
  const std::vector<int> three = {0, 2, 5};
  std::vector<int> many(20);
  for (int i = 0; i < 20; ++i) many[i] = i;
  EXPECT_EQ(list_ranks(one), "rank 3");
  EXPECT_EQ(list_ranks(two), "ranks 0 and 4");
  EXPECT_EQ(list_ranks(three), "ranks 0, 2 and 5");
  EXPECT_EQ(list_ranks(many),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more");
}

TEST(EncodedFailure, ComesBackAsItWas) {
  const Failure failure{.info = {.code = ErrorCode::kMismatch,
                                 .operation = Operation::kCombine,
                                 .epoch = ~std::uint64_t{0},
                                 .phase = Phase::kRows,
                                 .peer = 1023,
                                 .expected = -5,
                                 .seen = std::int64_t{1} << 40,
                                 .waited = std::chrono::nanoseconds(7),
                                 .limit = std::chrono::nanoseconds::max()},
                        .message = "some text"};
  const auto decoded = decode_failure(encode(failure));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->message, failure.message);
  EXPECT_EQ(decoded->info.code, failure.info.code);
  EXPECT_EQ(decoded->info.operation, failure.info.operation);
  EXPECT_EQ(decoded->info.epoch, failure.info.epoch);
  EXPECT_EQ(decoded->info.phase, failure.info.phase);
  EXPECT_EQ(decoded->info.peer, failure.info.peer);
  EXPECT_EQ(decoded->info.expected, failure.info.expected);
  EXPECT_EQ(decoded->info.seen, failure.info.seen);
  EXPECT_EQ(decoded->info.waited, failure.info.waited);
  EXPECT_EQ(decoded->info.limit, failure.info.limit);
}

TEST(EncodedFailure, NonsenseIsRefusedAndLongTextCut) {
  EXPECT_FALSE(decode_failure({}));
  EXPECT_FALSE(decode_failure(std::vector<std::byte>(47)));
  EXPECT_FALSE(decode_failure(std::vector<std::byte>(100, std::byte{0xff})));
  EXPECT_FALSE(decode_failure(std::vector<std::byte>(100'000)));
  for (const int peer : {-2, INT_MIN, kMaxRanks, INT_MAX}) {  // no rank, and not none
    EXPECT_FALSE(decode_failure(encode({.info = {.peer = peer}, .message = "text"})));
  }
  const auto decoded = decode_failure(encode({.info = {}, .message = std::string(1 << 20, 'm')}));
  ASSERT_TRUE(decoded);
  EXPECT_GT(decoded->message.size(), 1000U);
}

class Failures : public testing::TestWithParam<Launch> {};

TEST_P(Failures, ARankThatDoesNotComeIsNamedToTheOthers) {
  SharedCounter reported;
  run(GetParam(), 4,
      [&](const Communicator& communicator) {
        communicator.barrier();
        if (communicator.rank() == 2) {
          reported.wait_for(3);
          return;
        }
        const auto start = steady_clock::now();
        require_error(ErrorCode::kTimeout, 2, {"rank 2 of 4 did not come to all_gather", "2000"},
                      [&] { static_cast<void>(communicator.all_gather({})); });
        require(steady_clock::now() - start < milliseconds(10'000), "soon");
        // And again at once: the group has failed.
        require_error(ErrorCode::kTimeout, 2, {"rank 2 of 4"}, [&] { communicator.barrier(); });
        reported.add_one();
        reported.wait_for(3);
      },
      {.timeout = kTimeout});
}

TEST_P(Failures, RankZeroThatDoesNotComeIsNamedAndToldWhenItDoes) {
  SharedCounter reported;
  run(GetParam(), 3,
      [&](const Communicator& communicator) {
        communicator.barrier();
        if (communicator.rank() == 0) {
          reported.wait_for(2);
          require_error(ErrorCode::kTimeout, 0, {"rank 0 of 3"}, [&] { communicator.barrier(); });
          reported.add_one();
          return;
        }
        require_error(ErrorCode::kTimeout, 0, {"of 3 did not come to barrier"},
                      [&] { communicator.barrier(); });
        reported.add_one();
        reported.wait_for(3);
      },
      {.timeout = kTimeout});
}

TEST_P(Failures, ARankThatLeavesIsNamedAtOnce) {
  for (const int leaver : {0, 1, 2}) {
    run(GetParam(), 3, [leaver](const Communicator& communicator) {
      communicator.barrier();
      if (communicator.rank() == leaver) return;
      const auto start = steady_clock::now();
      require_error(ErrorCode::kPeerLost, leaver, {"rank " + std::to_string(leaver)}, [&] {
        for (;;) communicator.barrier();
      });
      require(steady_clock::now() - start < milliseconds(10'000), "long before the timeout");
    });
  }
}

TEST_P(Failures, AnExchangeThatIsCompleteSurvivesAnEarlyLeaver) {
  for (int round = 0; round < 20; ++round) {
    run(GetParam(), 4, [](const Communicator& communicator) {
      const auto all = communicator.all_gather(bytes_of("x"));
      require(all.size() == 4, "complete");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Failures, testing::Values(Launch::kThreads, Launch::kProcesses),
                         [](const auto& instance) { return name_of(instance.param); });

TEST(Timeouts, OfDifferentLengthEndTogetherWithTheShortest) {
  const std::string name = unique_name();
  SharedCounter reported;
  run(Launch::kProcesses, 3, [&](const Communicator& outer) {
    const auto communicator =
        Communicator::connect(name, outer.rank(), outer.size(),
                              {.timeout = outer.rank() == 1 ? kTimeout : milliseconds(60'000)});
    communicator.barrier();
    if (communicator.rank() == 2) {
      reported.wait_for(2);
      return;
    }
    const auto start = steady_clock::now();
    require_error(ErrorCode::kTimeout, 2, {"rank 2 of 3"}, [&] { communicator.barrier(); });
    require(steady_clock::now() - start < milliseconds(20'000), "long before rank 0's timeout");
    reported.add_one();
  });
}

// Processes die by SIGKILL in the middle of the others' exchange.
TEST(KilledRank, IsNamedToAllOthersWithinTheTimeout) {
  for (const int victim : {0, 1, 3}) {
    const auto exits = run_processes(4, [victim](const Communicator& communicator) {
      communicator.barrier();
      if (communicator.rank() == victim) {
        std::this_thread::sleep_for(milliseconds(50));  // the others are likely waiting by now
        raise(SIGKILL);
      }
      const auto start = steady_clock::now();
      require_error(ErrorCode::kPeerLost, victim, {"rank " + std::to_string(victim) + " (process"},
                    [&] {
                      for (;;) static_cast<void>(communicator.all_gather(bytes_of("data")));
                    });
      require(steady_clock::now() - start < milliseconds(10'000), "long before the timeout");
      return 0;
    });
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
      EXPECT_EQ(exits[rank].signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
    }
  }
}

TEST(StoppedRank, IsNamedWhenTheTimeoutIsOver) {
  const auto exits = run_processes(
      3,
      [](const Communicator& communicator) {
        const auto process = getpid();
        std::vector<std::byte> own(sizeof process);
        std::memcpy(own.data(), &process, sizeof process);
        const auto all = communicator.all_gather(own);
        if (communicator.rank() == 1) {
          raise(SIGSTOP);
          return 0;
        }
        if (communicator.rank() == 2) {
          require_error(ErrorCode::kTimeout, 1, {"rank 1 of 3"}, [&] { communicator.barrier(); });
          return 0;
        }
        require_error(ErrorCode::kTimeout, 1, {"rank 1 of 3"}, [&] { communicator.barrier(); });
        pid_t stopped = 0;
        std::memcpy(&stopped, all[1].data(), sizeof stopped);
        kill(stopped, SIGKILL);
        return 0;
      },
      {.timeout = kTimeout});
  EXPECT_EQ(exits[0].error, "");
  EXPECT_EQ(exits[1].signal, SIGKILL);
  EXPECT_EQ(exits[2].error, "");
}

TEST(DescriptorsThatFindNoRoom, AreReportedToAll) {
  run(Launch::kProcesses, 20, [](const Communicator& communicator) {
    const Descriptor own(dup(STDOUT_FILENO));
    require(static_cast<bool>(own), "a descriptor");
    if (communicator.rank() == 0) {
      // Its connections fit, the peers' descriptors do not.
      const auto most = static_cast<rlim_t>(dup(STDIN_FILENO)) + 4;
      const rlimit limit{.rlim_cur = most, .rlim_max = most};
      require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "a limit on open files");
    }
    require_error(ErrorCode::kResource, 0, {"rank 0 has no room", "ulimit -n"}, [&] {
      static_cast<void>(communicator.bootstrap()->all_gather_descriptors(own));
    });
  });
}

TEST(ThrowingThread, TellsItsPeersWhatItThrew) {
  std::vector<std::string> texts(3);
  try {
    run_threads(3, [&](const Communicator& communicator) {
      if (communicator.rank() == 1) throw std::runtime_error("the experts are tired");
      try {
        communicator.barrier();
      } catch (const Error& error) {
        texts[communicator.rank()] = error.what();
        EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
        EXPECT_EQ(error.peer(), 1);
      }
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the experts are tired");
  }
  for (const int rank : {0, 2}) {
    EXPECT_NE(texts[rank].find("rank 1 ended with an exception: the experts are tired"),
              std::string::npos)
        << texts[rank];
  }
}

TEST(MessageOverTheLimit, IsRefused) {
  run(Launch::kProcesses, 2, [](const Communicator& communicator) {
    const std::vector<std::byte> huge((std::size_t{64} << 20) + 1);
    require_error(ErrorCode::kInvalidArgument, -1, {"67108865 bytes exceeds the limit of 67108864"},
                  [&] { static_cast<void>(communicator.all_gather(huge)); });
    communicator.barrier();  // nothing was sent: the group goes on
  });
}

TEST(Objects, AreNotSharedBetweenProcesses) {
  run(Launch::kProcesses, 2, [](const Communicator& communicator) {
    require_error(ErrorCode::kUnsupported, -1, {"between processes"}, [&] {
      static_cast<void>(communicator.bootstrap()->all_gather_objects(nullptr));
    });
    require_error(ErrorCode::kInvalidArgument, -1, {"needs a descriptor"}, [&] {
      static_cast<void>(communicator.bootstrap()->all_gather_descriptors(Descriptor()));
    });
  });
}

}  // namespace
}  // namespace tandem::runtime
