// Operations across hosts in which a process or a link fails: each rank that is left gets an error
// that names a culprit, in time, and ends in order.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "runtime/launch.h"
#include "support/exchange.h"
#include "support/hosts.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr Shape kShape{
    .num_ranks = 4, .num_experts = 8, .hidden = 2048, .topk = 4, .max_tokens = 32};

// Runs operations until one fails, and returns its error.
Error operate_until_an_error(Rank& rank, const Scenario& scenario, std::chrono::nanoseconds timeout,
                             const std::function<void(int)>& before) {
  BufferOptions options = options_for(scenario.shape);
  options.timeout = timeout;
  Buffer buffer(rank.communicator(), options);
  Exchange exchange(rank, scenario, buffer);
  rank.barrier();
  const auto start = std::chrono::steady_clock::now();
  try {
    for (int round = 0; std::chrono::steady_clock::now() - start < 60s; ++round) {
      before(round);
      exchange.run(buffer);
    }
  } catch (const Error& error) {
    // The buffer says it again, and nothing waits any more.
    rank.expect_error(ErrorCode::kFailedBuffer, {error.message()}, [&] { exchange.run(buffer); });
    return error;
  }
  throw std::runtime_error("nobody was missed: " + rank.failures());
}

void require_ok(Rank& rank) {
  if (!rank.failures().empty()) throw std::runtime_error(rank.failures());
}

// The victim dies in the middle of whatever it does then. Rank 0 shares its host with rank 3, which
// thus hears of it in both ways.
TEST(NetFailures, RankThatIsKilledIsNamedByAllBeforeTheTimeout) {
  const Scenario scenario = make_scenario(kShape);
  for (const int victim : {1, 3}) {
    SCOPED_TRACE(victim);
    const auto exits = run_processes(
        kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
        [&](const Communicator& communicator) {
          Rank rank(communicator);
          const auto start = std::chrono::steady_clock::now();
          const Error error = operate_until_an_error(rank, scenario, 30s, [&](int round) {
            if (rank.index() != victim || round > 0) return;
            std::thread([] {
              std::this_thread::sleep_for(300ms);
              ::raise(SIGKILL);
            }).detach();
          });
          rank.expect(error.code() == ErrorCode::kPeerLost, error.what());
          rank.expect_equal(error.peer(), victim, error.what());
          rank.expect(std::chrono::steady_clock::now() - start < 20s, "told before the timeout");
          require_ok(rank);
          return 0;
        });
    for (int rank = 0; rank < kShape.num_ranks; ++rank) {
      EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
      EXPECT_EQ(exits[rank].signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
    }
  }
}

// What a link that is down, or loses all, looks like: silence. Host 1 has rank 1 alone.
void expect_silence_to_name_the_host(const std::function<void()>& cut,
                                     const std::function<void()>& mend) {
  const Scenario scenario = make_scenario(kShape);
  const auto exits = run_processes(
      kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
      [&](const Communicator& communicator) {
        Rank rank(communicator);
        const Error error = operate_until_an_error(rank, scenario, 2s, [&](int round) {
          if (round == 20 && rank.index() == 0) cut();
        });
        rank.expect(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kPeerLost,
                    error.what());
        // Those who are cut off cannot know who is.
        if (rank.index() != 1) rank.expect_equal(error.peer(), 1, error.what());
        require_ok(rank);
        return 0;
      });
  mend();
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

TEST(NetFailures, LinkThatGoesDownIsATimeoutThatNamesTheRankBehindIt) {
  expect_silence_to_name_the_host([] { hosts().set_link(1, false); },
                                  [] { hosts().set_link(1, true); });
}

// Of the link of host 1: what comes in there is lost.
constexpr std::pair<int, const char*> kBothEnds[] = {{1, "eth0"},
                                                     {tools::NetworkHosts::kSwitch, "port1"}};

TEST(NetFailures, LossOfEverythingIsATimeoutThatNamesTheRankBehindIt) {
  expect_silence_to_name_the_host(
      [] {
        for (const auto& [host, device] : kBothEnds) {
          hosts().run(
              host, {"nft", "-f", "-"},
              std::string("table netdev cut { chain in { type filter hook ingress device ") +
                  device + " priority 0; drop; }; }");
        }
      },
      [] {
        for (const auto& [host, device] : kBothEnds) {
          hosts().run(host, {"nft", "delete", "table", "netdev", "cut"});
        }
      });
}

// Only rank 0 is impatient. What it gives up for is told to those who would wait for longer, on its
// host and on others, and to the rank that was late.
TEST(NetFailures, WhatOneRankNoticesIsToldToAllHosts) {
  const Scenario scenario = make_scenario(kShape);
  const Shared<std::atomic<int>> num_told;
  const auto exits = run_processes(
      kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
      [&](const Communicator& communicator) {
        Rank rank(communicator);
        const auto start = std::chrono::steady_clock::now();
        const Error error =
            operate_until_an_error(rank, scenario, rank.index() == 0 ? 2s : 50s, [&](int round) {
              if (round != 5 || rank.index() != 1) return;
              while (*num_told < kShape.num_ranks - 1) std::this_thread::sleep_for(1ms);
            });
        ++*num_told;
        rank.expect(error.code() == ErrorCode::kTimeout, error.what());
        rank.expect_equal(error.peer(), 1, error.what());
        rank.expect(std::chrono::steady_clock::now() - start < 40s, "told before its own timeout");
        require_ok(rank);
        return 0;
      });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

TEST(NetFailures, MismatchIsToldOnAllHosts) {
  Shape shape = kShape;
  shape.tokens = {8, 8, 8, 8};
  const Scenario scenario = make_scenario(shape);
  const auto exits =
      run_processes(kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
                    [&](const Communicator& communicator) {
                      Rank rank(communicator);
                      BufferOptions options = options_for(shape);
                      options.timeout = 20s;
                      Buffer buffer(communicator, options);
                      Exchange exchange(rank, scenario, buffer);
                      DispatchOptions odd = exchange.dispatch_options();
                      if (rank.index() == 2) odd.max_tokens = kShape.max_tokens - 1;
                      rank.expect_error(ErrorCode::kMismatch, {"max_tokens", "31"}, [&] {
                        static_cast<void>(buffer.dispatch(exchange.x(), exchange.topk_idx(), odd));
                      });
                      require_ok(rank);
                      return 0;
                    });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

// A new start, and three pairs. While a link comes back a rank may miss the end of a new start that
// others have seen: it calls again, which takes them out of their first operation, to meet it.
void start_anew(Buffer& buffer, Exchange& exchange) {
  while (const auto error = runtime::error_of([&] {
           static_cast<void>(buffer.recover());
           for (int pair = 0; pair < 3; ++pair) exchange.run(buffer);
         })) {
    const ErrorCode code = error->code();
    if (code != ErrorCode::kTimeout && code != ErrorCode::kFailedBuffer) throw Error(*error);
  }
}

// What each rank of a new start does: it fails somehow, meets the others, and all is as before.
void expect_new_starts(int num_rounds,
                       const std::function<void(Rank&, Buffer&, Exchange&, int)>& fail) {
  Shape shape = kShape;
  shape.placement = Placement::kSlotted;  // rows are sent before anybody is waited for
  const Scenario scenario = make_scenario(shape);
  const auto exits = run_processes(kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
                                   [&](const Communicator& communicator) {
                                     Rank rank(communicator);
                                     BufferOptions options = options_for(shape);
                                     options.timeout = 2s;
                                     options.first_epoch = 0xfffffff0U;
                                     Buffer buffer(communicator, options);
                                     Exchange exchange(rank, scenario, buffer);
                                     for (int round = 0; round < num_rounds; ++round) {
                                       exchange.run(buffer);
                                       fail(rank, buffer, exchange, round);
                                       start_anew(buffer, exchange);
                                     }
                                     require_ok(rank);
                                     return 0;
                                   });
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
}

// Rank 1 is alone on its host, ranks 0 and 3 share one.
TEST(NetFailures, AllRecoverAfterATimeout) {
  expect_new_starts(4, [](Rank& rank, Buffer& buffer, Exchange& exchange, int round) {
    const int late = round % 2 == 0 ? 1 : 3;
    rank.barrier();
    if (rank.index() == late) rank.barrier();
    rank.expect_error(ErrorCode::kTimeout, {"waited for", "rank " + std::to_string(late)},
                      [&] { exchange.run(buffer); });
    if (rank.index() != late) rank.barrier();
  });
}

// Rows of the operation that failed are still under way when the link is there again.
TEST(NetFailures, AllRecoverAfterACut) {
  const Shared<Gathering> all_ready;
  expect_new_starts(1, [&](Rank& rank, Buffer& buffer, Exchange& exchange, int) {
    all_ready->await(kShape.num_ranks);
    if (rank.index() == 0) hosts().set_link(1, false);
    const auto error = runtime::error_of([&] {
      for (;;) exchange.run(buffer);
    });
    rank.expect(error->code() == ErrorCode::kTimeout, error->what());
    if (rank.index() == 0) hosts().set_link(1, true);  // TCP takes a while to notice
  });
}

// One calls recover() where nothing has failed: all are told, and meet it.
TEST(NetFailures, ARankThatRecoversIsJoinedByAllHosts) {
  expect_new_starts(3, [](Rank& rank, Buffer& buffer, Exchange& exchange, int) {
    rank.barrier();
    if (rank.index() == 1) return;
    const auto error = runtime::error_of([&] {
      for (;;) exchange.run(buffer);
    });
    rank.expect(error->code() == ErrorCode::kFailedBuffer, error->what());
  });
}

TEST(NetFailures, TheOthersStartAnewWithoutARankThatIsLost) {
  const Scenario scenario = make_scenario(kShape);
  for (const int victim : {1, 3}) {
    SCOPED_TRACE(victim);
    const Scenario rest = without(scenario, {victim});
    const Shared<Gathering> all_ready;
    const auto exits =
        run_processes(kShape.num_ranks, connect_on_hosts(kShape.num_ranks, 3),
                      [&](const Communicator& communicator) {
                        Rank rank(communicator);
                        Buffer buffer(communicator, options_for(kShape));
                        Exchange exchange(rank, scenario, buffer);
                        exchange.run(buffer);
                        all_ready->await(kShape.num_ranks);
                        if (rank.index() == victim) ::raise(SIGKILL);
                        rank.expect_error(ErrorCode::kPeerLost, {"rank " + std::to_string(victim)},
                                          [&] { exchange.run(buffer); });
                        std::vector<bool> others(kShape.num_ranks, true);
                        others[victim] = false;
                        rank.expect(buffer.recover() == others, "the victim is left behind");
                        Exchange rest_exchange(rank, rest, buffer);
                        for (int pair = 0; pair < 3; ++pair) rest_exchange.run(buffer);
                        require_ok(rank);
                        return 0;
                      });
    for (int rank = 0; rank < kShape.num_ranks; ++rank) {
      EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
      EXPECT_EQ(exits[rank].signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
    }
  }
}

}  // namespace
}  // namespace tandem::test
