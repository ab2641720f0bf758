// Processes that become a rank of a running buffer: in place of one that has gone, or as one more.
// The others run on, and from one operation on, the same for all, it is there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>

#include "support/party.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kNewcomer = 1;  // the rank that goes and comes

std::string fresh_name(const char* what) {
  static int number = 0;
  return std::string("rejoin_test_") + what + '_' + std::to_string(::getpid()) + '_' +
         std::to_string(number++);
}

Shape entangled(int num_ranks) {
  return {.num_ranks = num_ranks,
          .num_experts = 2 * num_ranks + 1,
          .hidden = 72,
          .topk = 4,
          .max_tokens = 8,
          .routing = Routing::kFull};
}

// Ranks of one host; on GPUs not threads of one process.
bool may_join() {
  const bool is_cpu = backend_under_test() == Backend::kCpu;
  if (ranks_share_memory() && (is_cpu || ranks_are_processes())) return true;
  std::cout << "not run: ranks that can be replaced are of one host, on GPUs processes"
            << std::endl;
  return false;
}

BufferOptions open_for(const Shape& shape, const std::string& door) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  options.door = door;
  return options;
}

constexpr int kPairs = 4;  // that all run with the newcomer

// The others: run pairs, without and then with it; the lowest lets it in.
void receive_newcomer(Rank& rank, Party& party, Buffer& buffer, int newcomer) {
  bool was_away = false;
  int together = 0;
  const auto start = std::chrono::steady_clock::now();
  while (together < kPairs && std::chrono::steady_clock::now() - start < 30s) {
    if (buffer.rank() == 0) {
      for (const int waiting : buffer.waiting()) {
        rank.expect_equal(waiting, newcomer, "who waits");
        try {
          buffer.unmask(waiting);
        } catch (const Error& error) {
          // On a GPU two operations must have passed since it was masked.
          const bool is_gpu = backend_under_test() == Backend::kCuda;
          rank.expect(is_gpu && error.code() == ErrorCode::kOrder, error.what());
        }
      }
    }
    const bool is_there = party.run(buffer)[newcomer];
    was_away = was_away || !is_there;
    if (was_away && is_there) ++together;
  }
  rank.expect_equal(together, kPairs, "pairs with the newcomer");
}

void be_newcomer(Rank& everyone, const Oracles& oracles, const BufferOptions& options,
                 int newcomer) {
  Rank rank(everyone.communicator(), newcomer);
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      Buffer buffer = Buffer::join(newcomer, options);
      rank.expect_equal(buffer.rank(), newcomer, "rank");
      rank.expect_equal(buffer.num_ranks(), oracles.shape().num_ranks, "ranks");
      Party party(rank, oracles, buffer);
      for (int pair = 0; pair < kPairs; ++pair) {
        rank.expect(party.run(buffer)[newcomer], "it is there");
      }
      everyone.expect(rank.failures().empty(), rank.failures());
      return;
    } catch (const Error& error) {
      // Its predecessor is still there.
      if (error.code() != ErrorCode::kOrder || std::chrono::steady_clock::now() - start > 30s) {
        throw;
      }
      std::this_thread::sleep_for(1ms);
    }
  }
}

// A stand-in for a rank of the buffer among more ranks than it has.
Rank member(const Rank& rank, const std::string& name, int size) {
  return Rank(Communicator::connect(name, rank.index(), size));
}

void run_replacement(const Shape& shape, std::uint32_t first_epoch) {
  const Oracles oracles(shape);
  const std::string name = fresh_name("replacement");
  const int size = shape.num_ranks;
  run_ranks(size + 1, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    options.first_epoch = first_epoch;
    if (everyone.index() == size) {
      be_newcomer(everyone, oracles, options, kNewcomer);
      return;
    }
    Rank rank = member(everyone, name, size);
    Buffer buffer(rank.communicator(), options);
    Party party(rank, oracles, buffer);
    for (int pair = 0; pair < 3; ++pair) rank.expect(party.run(buffer)[kNewcomer], "all are there");
    if (rank.index() != kNewcomer) receive_newcomer(rank, party, buffer, kNewcomer);
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

TEST(Rejoin, RankThatHasLeftIsReplacedWhileTheOthersRunOn) {
  if (!may_join()) return;
  Shape shape = entangled(3);
  run_replacement(shape, 1);
  run_replacement(shape, 0xfffffff0U);  // the wrap falls into the middle
  shape.placement = Placement::kSlotted;
  shape.hook = true;
  shape.layout = Layout::kPacked;
  shape.format = Format::kFp8;
  run_replacement(shape, 1);
  shape = entangled(2);
  shape.zero_copy = true;
  run_replacement(shape, 1);
}

TEST(Rejoin, RankIsAddedThatHasNeverBeenThere) {
  if (!may_join()) return;
  for (const int present : {1, 2}) {
    const Shape shape = entangled(present + 1);
    const Oracles oracles(shape);
    const std::string name = fresh_name("growth");
    run_ranks(present + 1, [&](Rank& everyone) {
      BufferOptions options = open_for(shape, name);
      options.max_ranks = present + 1;
      if (everyone.index() == present) {
        be_newcomer(everyone, oracles, options, present);
        return;
      }
      Rank rank = member(everyone, name, present);
      Buffer buffer(rank.communicator(), options);
      rank.expect_equal(buffer.num_ranks(), present + 1, "ranks that there may be");
      rank.expect(!buffer.active()[present], "the last is not there yet");
      Party party(rank, oracles, buffer);
      receive_newcomer(rank, party, buffer, present);
      everyone.expect(rank.failures().empty(), rank.failures());
    });
  }
}

// A rank that has never been there has said nothing of operation 0 either.
TEST(Rejoin, FirstOperationOfANewRankMayBeTheOneAfterTheWrap) {
  if (!may_join()) return;
  const Shape shape = entangled(2);
  const Oracles oracles(shape);
  const std::string name = fresh_name("wrap");
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    options.max_ranks = 2;
    options.first_epoch = 0xfffffffeU;  // a rank is let in for the operation after the next
    if (everyone.index() == kNewcomer) {
      be_newcomer(everyone, oracles, options, kNewcomer);
      return;
    }
    Rank rank = member(everyone, name, 1);
    Buffer buffer(rank.communicator(), options);
    Party party(rank, oracles, buffer);
    while (buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
    receive_newcomer(rank, party, buffer, kNewcomer);
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

// Again and again, and nothing is left behind in those that stay.
TEST(Rejoin, TurnoverLeaksNothing) {
  if (!may_join()) return;
  constexpr int kTurns = 5;
  const Shape shape = entangled(2);
  const Oracles oracles(shape);
  const std::string name = fresh_name("turnover");
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    Rank rank = member(everyone, name, 2);
    auto buffer = std::make_unique<Buffer>(rank.communicator(), options);
    auto party = std::make_unique<Party>(rank, oracles, *buffer);
    rank.expect(party->run(*buffer)[kNewcomer], "both are there");
    if (rank.index() == kNewcomer) {
      party.reset();
      buffer.reset();
      for (int turn = 0; turn < kTurns; ++turn) be_newcomer(rank, oracles, options, kNewcomer);
    } else {
      const auto num_mappings = [] {
        std::ifstream maps("/proc/self/maps");
        int count = 0;
        for (std::string line; std::getline(maps, line);) {
          if (line.find("memfd:tandem") != std::string::npos) ++count;
        }
        return count;
      };
      receive_newcomer(rank, *party, *buffer, kNewcomer);
      const int mappings = num_mappings();
      for (int turn = 1; turn < kTurns; ++turn) {
        receive_newcomer(rank, *party, *buffer, kNewcomer);
      }
      if (ranks_are_processes()) rank.expect_equal(num_mappings(), mappings, "mappings");
    }
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

// Killed at any moment, for real; only where ranks are processes.
TEST(Rejoin, KilledRankIsReplaced) {
  if (!ranks_are_processes() || !may_join()) return;
  const Shape shape = entangled(3);
  const Oracles oracles(shape);
  for (int trial = 0; trial < 4; ++trial) {
    const std::string name = fresh_name("killed");
    const auto exits = run_processes(4, [&](const Communicator& launched) {
      Rank everyone(launched);
      const BufferOptions options = open_for(shape, name);
      if (everyone.index() == 3) {
        be_newcomer(everyone, oracles, options, kNewcomer);
      } else {
        Rank rank = member(everyone, name, 3);
        Buffer buffer(rank.communicator(), options);
        Party party(rank, oracles, buffer);
        if (rank.index() == kNewcomer) {
          std::thread([trial] {
            std::this_thread::sleep_for(trial * 700us);
            ::raise(SIGKILL);
          }).detach();
          for (;;) party.run(buffer);
        }
        receive_newcomer(rank, party, buffer, kNewcomer);
        everyone.expect(rank.failures().empty(), rank.failures());
      }
      if (!everyone.failures().empty()) throw std::runtime_error(everyone.failures());
      return 0;
    });
    for (int process = 0; process < 4; ++process) {
      EXPECT_EQ(exits[process].signal, process == kNewcomer ? SIGKILL : 0) << process;
      if (process != kNewcomer) {
        EXPECT_EQ(exits[process].exit_code, 0) << process << ": " << exits[process].error;
      }
    }
  }
}

TEST(Rejoin, IsRefusedWithAReason) {
  if (!may_join()) return;
  const Shape shape = entangled(2);
  const std::string name = fresh_name("refused");
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    options.timeout = 200ms;
    everyone.expect_error(ErrorCode::kInvalidArgument, {"door is empty"}, [&] {
      BufferOptions closed = options;
      closed.door = "";
      Buffer::join(0, closed);
    });
    everyone.expect_error(ErrorCode::kInvalidArgument, {"door", "control characters"}, [&] {
      BufferOptions odd = options;
      odd.door = "a\nb";
      static_cast<void>(Buffer::size_bytes(odd, 2));
    });
    if (everyone.index() == 0) {
      everyone.expect_error(ErrorCode::kTimeout, {"nobody opens a door of '" + name + "'"},
                            [&] { Buffer::join(1, options); });
    }
    everyone.barrier();
    Rank rank = member(everyone, name, 2);
    rank.expect_error(ErrorCode::kInvalidArgument, {"max_ranks is 1", "2"}, [&] {
      BufferOptions few = options;
      few.max_ranks = 1;
      Buffer buffer(rank.communicator(), few);
    });
    std::optional<Buffer> buffer(std::in_place, rank.communicator(), options);
    rank.barrier();
    if (rank.index() == 0) {
      rank.expect_error(ErrorCode::kOrder, {"rank 1", "another process is that rank"},
                        [&] { Buffer::join(1, options); });
      rank.expect_error(ErrorCode::kMismatch, {"max_hidden", "rank 0", "rank 2"}, [&] {
        BufferOptions other = options;
        other.max_hidden = 1000;
        Buffer::join(2, other);
      });
      rank.expect_error(ErrorCode::kInvalidArgument, {"rank is 2", "[0, 2)"},
                        [&] { Buffer::join(2, options); });
    }
    rank.barrier();
    if (rank.index() == 1) buffer.reset();
    rank.barrier();
    if (rank.index() == 0) {
      rank.expect_error(ErrorCode::kTimeout, {"rank 1 is still active"},
                        [&] { Buffer::join(1, options); });
      buffer->mask(1);
      rank.expect_error(ErrorCode::kTimeout, {"unmask(1)"}, [&] { Buffer::join(1, options); });
      rank.expect(buffer->waiting().empty(), "nobody waits any more");
    }
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

}  // namespace
}  // namespace tandem::test
