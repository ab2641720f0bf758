// Ranks of several hosts of which some are lost, cut off, masked or let in: the others go on, all
// with the same ranks in the same step, and what they get is right; a part that is too small does
// not.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <random>
#include <thread>

#include "runtime/launch.h"
#include "support/hosts.h"
#include "support/party.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kMaxRanks = 5;
constexpr int kMaxPairs = 500;
constexpr auto kTimeout = 2s;  // where somebody is missed: those who are not must not be that late

// What each rank has seen: by pair of operations, whose rows its dispatch placed, a bit each.
struct Seen {
  int num_pairs[kMaxRanks] = {};
  int num_compared[kMaxRanks] = {};
  std::atomic<bool> is_done[kMaxRanks] = {};
  std::atomic<bool> is_cut = false;
  std::atomic<int> num_stopped = 0;  // behind a cut
  unsigned sources[kMaxRanks][kMaxPairs] = {};
};

Shape entangled(int num_ranks, bool hook) {
  Shape shape{.num_ranks = num_ranks,
              .num_experts = 2 * num_ranks + 1,
              .hidden = 200,
              .topk = 6,
              .max_tokens = 12,
              .tokens = {9, 12, 6, 11, 8},
              .routing = Routing::kFull};
  shape.tokens.resize(num_ranks);
  shape.hook = hook;
  shape.placement = hook ? Placement::kSlotted : Placement::kPacked;
  shape.zero_copy = hook;
  return shape;
}

BufferOptions masking(const Shape& shape, std::chrono::nanoseconds timeout) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  options.timeout = timeout;
  options.first_epoch = 0xfffffff0U;
  return options;
}

void require_ok(const Rank& rank) {
  if (!rank.failures().empty()) throw std::runtime_error(rank.failures());
}

// A pair, judged by the oracle; what it has seen is noted. Who took part?
Present run_pair(Rank& rank, Party& party, Buffer& buffer, Seen& seen) {
  const Present present = party.run(buffer);
  const ConstTensorView ranges = party.exchange().result().ranges;
  const auto* const words = ranges.as<std::int64_t>();
  unsigned sources = 0;
  for (std::int64_t i = 0; i < ranges.shape[0] * ranges.shape[1]; ++i) {
    if ((words[i] & 0xffffffff) > 0) sources |= 1U << (i % ranges.shape[1]);
  }
  int& pair = seen.num_pairs[rank.index()];
  if (pair < kMaxPairs) seen.sources[rank.index()][pair++] = sources;
  require_ok(rank);
  return present;
}

// In no step have two ranks that went on placed the rows of different ranks.
void expect_the_same_steps(const Seen& seen, const std::vector<int>& survivors) {
  const int first = survivors.front();
  for (const int rank : survivors) {
    const int num_compared = std::min(seen.num_compared[rank], seen.num_compared[first]);
    EXPECT_GE(num_compared, 3);
    for (int pair = 0; pair < num_compared; ++pair) {
      EXPECT_EQ(seen.sources[rank][pair], seen.sources[first][pair])
          << "rank " << rank << ", pair " << pair;
    }
  }
}

bool is_among(int rank, const std::vector<int>& ranks) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool are_done(const Seen& seen, const Present& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank] && !seen.is_done[rank]) return false;
  }
  return true;
}

void note_loss(Rank& rank, const Buffer& buffer, const std::vector<int>& victims) {
  const std::optional<Error> loss = buffer.last_loss();
  rank.expect(loss && loss->code() == ErrorCode::kPeerLost && is_among(loss->peer(), victims),
              loss ? loss->what() : "there is no reason");
  require_ok(rank);
}

// The victims are killed somewhere in the middle; the others run on.
void expect_survivors_to_go_on(const Shape& shape, const std::vector<int>& victims,
                               std::chrono::microseconds delay) {
  SCOPED_TRACE("delay " + std::to_string(delay.count()) + " us");
  const Oracles oracles(shape);
  const Shared<Seen> seen;
  const Shared<Gathering> all_ready;
  const auto exits = run_processes(
      shape.num_ranks, connect_on_hosts(shape.num_ranks, 3), [&](const Communicator& communicator) {
        Rank rank(communicator);
        Buffer buffer(communicator, masking(shape, 20s));
        Party party(rank, oracles, buffer);
        all_ready->await(shape.num_ranks);
        if (is_among(rank.index(), victims)) {
          std::thread([delay] {
            std::this_thread::sleep_for(delay);
            ::raise(SIGKILL);
          }).detach();
        }
        const Present rest = all_but(shape.num_ranks, victims);
        const auto start = std::chrono::steady_clock::now();
        // Some count the pair in which the victims were lost, and none leaves before all are done.
        for (int pairs_of_the_rest = 0; !are_done(*seen, rest);) {
          rank.expect(std::chrono::steady_clock::now() - start < 30s, "the victims are missed");
          Present present;
          const auto error =
              runtime::error_of([&] { present = run_pair(rank, party, buffer, *seen); });
          if (error && !are_done(*seen, rest)) throw Error(*error);
          if (present != rest || ++pairs_of_the_rest != 5) continue;
          note_loss(rank, buffer, victims);
          seen->num_compared[rank.index()] = seen->num_pairs[rank.index()];
          seen->is_done[rank.index()] = true;
        }
        return 0;
      });
  std::vector<int> survivors;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
    EXPECT_EQ(exits[rank].signal, is_among(rank, victims) ? SIGKILL : 0) << "rank " << rank;
    if (!is_among(rank, victims)) survivors.push_back(rank);
  }
  expect_the_same_steps(*seen, survivors);
}

// Ranks 0 and 3 share a host: each loss is seen on the board by one rank at most.
TEST(NetMasks, SurvivorsOfAllHostsGoOnWithoutARankThatIsKilled) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 4; ++trial) {
    for (const int victim : {0, 1, 3}) {
      SCOPED_TRACE("victim " + std::to_string(victim));
      const std::chrono::microseconds delay(1000 + random() % 30'000);
      expect_survivors_to_go_on(entangled(4, trial % 2 == 1), {victim}, delay);
    }
  }
}

// One on the host of others and one that is alone there, at once: 3 of 5 go on.
TEST(NetMasks, SurvivorsGoOnWithoutTwoThatAreKilledAtOnce) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 4; ++trial) {
    const std::chrono::microseconds delay(1000 + random() % 20'000);
    expect_survivors_to_go_on(entangled(5, trial % 2 == 1), {2, 3}, delay);
  }
}

// What rank 1 sends reaches rank 0, which ends its dispatch with it, and not rank 2, which has it
// masked: it takes the counts that rank 0 has, and counts the rows as well, which it never got.
// (Rank 1 is patient, since it goes on to wait for rank 2, which cannot answer: that it may be the
// first to have the other masked is another matter.)
TEST(NetMasks, ARankWhoseMessagesReachSomeOnlyIsCountedByAllOrNone) {
  const Shape shape = entangled(3, true);
  const Oracles oracles(shape);
  const Shared<Seen> seen;
  const Shared<Gathering> all_ready;
  const auto exits = run_processes(
      shape.num_ranks, connect_on_hosts(shape.num_ranks, 3), [&](const Communicator& communicator) {
        Rank rank(communicator);
        Buffer buffer(communicator, masking(shape, rank.index() == 1 ? 20s : kTimeout));
        Party party(rank, oracles, buffer);
        static_cast<void>(run_pair(rank, party, buffer, *seen));
        all_ready->await(shape.num_ranks);
        if (rank.index() == 2) {
          hosts().run(2, {"nft", "-f", "-"},
                      "table netdev cut { chain in { type filter hook ingress device eth0 priority "
                      "0; ip saddr " +
                          tools::NetworkHosts::address(1) + " drop; }; }");
          seen->is_cut = true;
        }
        while (!seen->is_cut) std::this_thread::sleep_for(1ms);
        if (rank.index() == 1) {
          const auto error = runtime::error_of([&] {
            for (;;) static_cast<void>(run_pair(rank, party, buffer, *seen));
          });
          rank.expect(error->code() == ErrorCode::kMasked, error->what());
        } else {
          const Present rest = all_but(shape.num_ranks, {1});
          rank.expect(run_pair(rank, party, buffer, *seen) == rest, "rank 1 is lost in that pair");
          rank.expect((party.num_blank_rows() > 0) == (rank.index() == 2), "who has its rows");
          rank.expect(run_pair(rank, party, buffer, *seen) == rest, "and after it");
          seen->num_compared[rank.index()] = seen->num_pairs[rank.index()];
        }
        require_ok(rank);
        return 0;
      });
  hosts().run(2, {"nft", "delete", "table", "netdev", "cut"});
  for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
  EXPECT_EQ(seen->sources[2][1], 7U) << "all are counted";
  expect_the_same_steps(*seen, {0, 2});
}

struct Cut {
  std::function<int(int)> place;  // host of each rank
  std::vector<int> lost;          // the ranks of host 1
};

// While a link comes back, some connections do before others, so that ranks may be masked once
// more: until all have run three pairs together.
void run_until_all_are_back(Rank& rank, Party& party, Buffer& buffer, Seen& seen) {
  const Present all(rank.size(), true);
  const auto start = std::chrono::steady_clock::now();
  for (int pairs_of_all = 0; !are_done(seen, all);) {
    rank.expect(std::chrono::steady_clock::now() - start < 60s, "all come back");
    require_ok(rank);
    std::this_thread::sleep_for(5ms);
    const auto error = runtime::error_of([&] {
      for (const int waiting : buffer.waiting()) buffer.unmask(waiting);
      if (run_pair(rank, party, buffer, seen) == all) ++pairs_of_all;
    });
    if (pairs_of_all == 3) seen.is_done[rank.index()] = true;
    if (error && !are_done(seen, all)) {
      static_cast<void>(runtime::error_of([&] { static_cast<void>(buffer.recover()); }));
    }
  }
}

// The link of host 1 goes down. The others go on; it does not, is told why, and comes back when the
// link has.
void expect_those_behind_a_cut_to_stop_and_return(const Shape& shape, const Cut& cut) {
  const Oracles oracles(shape);
  const Shared<Seen> seen;
  const auto exits =
      run_processes(shape.num_ranks, connect_on_hosts(shape.num_ranks, cut.place),
                    [&](const Communicator& communicator) {
                      Rank rank(communicator);
                      Buffer buffer(communicator, masking(shape, kTimeout));
                      Party party(rank, oracles, buffer);
                      rank.barrier();
                      if (is_among(rank.index(), cut.lost)) {
                        const auto error = runtime::error_of([&] {
                          for (;;) static_cast<void>(run_pair(rank, party, buffer, *seen));
                        });
                        rank.expect(error->code() == ErrorCode::kTimeout, error->what());
                        rank.expect(std::string_view(error->what()).find("more than half") !=
                                        std::string_view::npos,
                                    error->what());
                        require_ok(rank);
                        ++seen->num_stopped;
                      } else {
                        const Present rest = all_but(shape.num_ranks, cut.lost);
                        for (int pairs_of_the_rest = 0; pairs_of_the_rest < 5;) {
                          if (seen->num_pairs[rank.index()] == 10 && rank.index() == 0) {
                            hosts().set_link(1, false);
                          }
                          if (run_pair(rank, party, buffer, *seen) == rest) ++pairs_of_the_rest;
                        }
                        seen->num_compared[rank.index()] = seen->num_pairs[rank.index()];
                      }
                      if (rank.index() == 0) {
                        std::thread([&] {  // once those behind the link have noticed as well
                          while (seen->num_stopped < std::ssize(cut.lost))
                            std::this_thread::sleep_for(1ms);
                          hosts().set_link(1, true);
                        })
                            .detach();
                      }
                      run_until_all_are_back(rank, party, buffer, *seen);
                      return 0;
                    });
  hosts().set_link(1, true);
  std::vector<int> survivors;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    EXPECT_EQ(exits[rank].error, "") << "rank " << rank;
    if (!is_among(rank, cut.lost)) survivors.push_back(rank);
  }
  expect_the_same_steps(*seen, survivors);
}

TEST(NetMasks, AHostBehindALinkThatIsDownStopsAndReturns) {
  for (const bool hook : {false, true}) {
    expect_those_behind_a_cut_to_stop_and_return(
        entangled(4, hook), {.place = [](int rank) { return rank % 3; }, .lost = {1}});
  }
}

// Half of the ranks are on either side: those with rank 0 go on.
TEST(NetMasks, OfTwoHalvesTheOneWithTheLowestRankGoesOn) {
  expect_those_behind_a_cut_to_stop_and_return(
      entangled(4, false), {.place = [](int rank) { return rank % 2; }, .lost = {1, 3}});
}

// By a call, and back: of a rank on the caller's host and one elsewhere, by a rank of each host.
TEST(NetMasks, RanksOfAnyHostAreMaskedAndLetInWhenAsked) {
  for (const bool hook : {false, true}) {
    const Shape shape = entangled(4, hook);
    const Oracles oracles(shape);
    const Shared<Seen> seen;
    const auto exits =
        run_processes(shape.num_ranks, connect_on_hosts(shape.num_ranks, 2),
                      [&](const Communicator& communicator) {
                        Rank rank(communicator);
                        Buffer buffer(communicator, masking(shape, 20s));
                        Party party(rank, oracles, buffer);
                        const Present all(shape.num_ranks, true);
                        for (int caller = 0; caller < shape.num_ranks; ++caller) {
                          for (const int step : {1, 2}) {
                            const int victim = (caller + step) % shape.num_ranks;
                            rank.barrier();
                            if (rank.index() == caller) buffer.mask(victim);
                            rank.barrier();
                            if (rank.index() == victim) {
                              rank.expect_error(ErrorCode::kMasked, {"has called mask("},
                                                [&] { static_cast<void>(party.run(buffer)); });
                              rank.expect(buffer.recover() == all, "all are there");
                            }
                            // From the first operation of the one that is let in on, with all.
                            for (int pairs_of_all = 0; pairs_of_all < 2;) {
                              if (rank.index() == caller && !buffer.waiting().empty())
                                buffer.unmask(victim);
                              if (run_pair(rank, party, buffer, *seen) == all) ++pairs_of_all;
                            }
                          }
                        }
                        return 0;
                      });
    for (const ProcessExit& exit : exits) EXPECT_EQ(exit.error, "");
  }
}

}  // namespace
}  // namespace tandem::test
