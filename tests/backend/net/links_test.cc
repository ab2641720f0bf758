// Links that are slow, lossy, interrupted or unequal: operations take longer and come out right.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include "support/delayed_link.h"
#include "support/exchange.h"
#include "support/hosts.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr Shape kShape{
    .num_ranks = 4, .num_experts = 8, .hidden = 2048, .topk = 4, .max_tokens = 32};

// Every rank runs `rounds` pairs and checks each against the oracle.
void expect_operations_to_be_right(const std::vector<Shape>& shapes,
                                   const std::function<int(int)>& place, int rounds,
                                   const std::function<void(Rank&, int)>& before = {}) {
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  const int num_ranks = shapes.front().num_ranks;
  const auto exits = run_processes(num_ranks, connect_on_hosts(num_ranks, place),
                                   [&](const Communicator& communicator) {
                                     Rank rank(communicator);
                                     Buffer buffer(communicator, options_for(shapes));
                                     for (const Scenario& scenario : scenarios) {
                                       Exchange exchange(rank, scenario, buffer);
                                       for (int round = 0; round < rounds; ++round) {
                                         if (before) before(rank, round);
                                         exchange.run(buffer);
                                       }
                                     }
                                     if (!rank.failures().empty())
                                       throw std::runtime_error(rank.failures());
                                     return 0;
                                   });
  for (const ProcessExit& exit : exits) {
    EXPECT_EQ(exit.error, "");
    EXPECT_EQ(exit.signal, 0);
  }
}

int in_turn(int rank) { return rank % 3; }

Shape with_placement(Placement placement, bool hook) {
  Shape shape = kShape;
  shape.placement = placement;
  shape.hook = hook;
  shape.zero_copy = true;
  return shape;
}

const std::vector<Shape> kShapes = {with_placement(Placement::kPacked, false),
                                    with_placement(Placement::kSlotted, true)};

TEST(NetLinks, UnequalHosts) {
  // Three ranks, one, and two; experts likewise.
  Shape shape = kShape;
  shape.num_ranks = 6;
  shape.num_experts = 9;
  shape.expert_owners = {0, 0, 0, 5, 5, 4, 3, 1, 0};
  shape.tokens = {32, 0, 7, 1, 32, 30};
  expect_operations_to_be_right(
      {shape},
      [](int rank) {
        constexpr int kHosts[] = {0, 2, 0, 1, 0, 2};
        return kHosts[rank];
      },
      10);
}

// Parcels of many pieces, outputs that go by rendezvous, and a row that is longer than a piece.
TEST(NetLinks, MoreThanGoesInOnePieceOrBatch) {
  Shape many = kShape;
  many.num_ranks = 2;
  many.hidden = 7168;
  many.max_tokens = 64;
  Shape wide = many;
  wide.hidden = 65536;
  wide.max_tokens = 3;
  wide.format = Format::kFloat32;
  std::vector<Shape> shapes;
  for (Shape shape : {many, wide}) {
    for (const bool hook : {false, true}) {
      shape.placement = hook ? Placement::kSlotted : Placement::kPacked;
      shape.hook = hook;
      shapes.push_back(shape);
    }
  }
  expect_operations_to_be_right(
      shapes, [](int rank) { return rank; }, 3);
}

TEST(NetLinks, FourHostsWithThreeRanksEach) {
  Shape shape = kShape;
  shape.num_ranks = 12;
  shape.num_experts = 24;
  shape.hidden = 512;
  expect_operations_to_be_right(
      {shape}, [](int rank) { return rank % 4; }, 5);
}

TEST(NetLinks, RateLimit) {
  hosts().run(1, {"tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst",
                  "32kb", "latency", "50ms"});
  expect_operations_to_be_right(kShapes, in_turn, 5);
  hosts().run(1, {"tc", "qdisc", "del", "dev", "eth0", "root"});
}

TEST(NetLinks, Loss) {
  hosts().run(1, {"nft", "-f", "-"},
              "table netdev loss { chain in { type filter hook ingress device eth0 priority 0; "
              "numgen random mod 1000 < 10 drop; }; }");
  expect_operations_to_be_right(kShapes, in_turn, 20);
  hosts().run(1, {"nft", "delete", "table", "netdev", "loss"});
}

// Ranks are forked while frames are carried, by whatever needs memory for that: if it were a thread
// they would find the allocator locked for ever.
TEST(NetLinks, RanksMayBeForkedBesideADelayedLink) {
  constexpr int kNumBlocks = 1000;
  const tools::NetworkHosts& all = hosts();
  const pid_t parent = ::getpid();
  const pid_t sender = ::fork();
  if (sender == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    all.enter(1);
    const int fd = ::socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(9);
    to.sin_addr.s_addr = htonl(0x0a630001);  // host 0
    const std::array<char, 1000> bytes{};
    for (;;) {
      static_cast<void>(::sendto(fd, bytes.data(), bytes.size(), 0,
                                 reinterpret_cast<const sockaddr*>(&to), sizeof to));
    }
  }
  {
    const DelayedLink link(all, 1, 1ms);
    for (int i = 0; i < 600; ++i) {
      const auto exits = run_processes(1, [](const Communicator&) {
        std::vector<std::unique_ptr<char[]>> blocks;
        for (int block = 0; block < kNumBlocks; ++block) {
          blocks.push_back(std::make_unique<char[]>(1042));
        }
        return 0;
      });
      EXPECT_EQ(exits[0].error, "");
    }
  }
  ::kill(sender, SIGKILL);
  ::waitpid(sender, nullptr, 0);
}

TEST(NetLinks, Delay) {
  constexpr auto kDelay = 5ms;
  const DelayedLink link(hosts(), 1, kDelay);
  std::chrono::steady_clock::time_point start;
  expect_operations_to_be_right(kShapes, in_turn, 5, [&](Rank& rank, int round) {
    // Nothing is faster than the link: it is there.
    if (round > 0) {
      rank.expect(std::chrono::steady_clock::now() - start >= 2 * kDelay, "the link is slow");
    }
    start = std::chrono::steady_clock::now();
  });
}

TEST(NetLinks, CutInMidOperationThatMendsBeforeTheTimeout) {
  std::jthread cutter;
  expect_operations_to_be_right(kShapes, in_turn, 20, [&](Rank& rank, int round) {
    if (rank.index() != 0) return;
    // While the operations that follow are at work. Who ran through all of them meanwhile waits, or
    // the link would stay down when its process ends.
    if (round == 10) {
      cutter = std::jthread([] {
        hosts().set_link(1, false);
        std::this_thread::sleep_for(700ms);
        hosts().set_link(1, true);
      });
    }
    if (round == 19) cutter.join();
  });
}

}  // namespace
}  // namespace tandem::test
