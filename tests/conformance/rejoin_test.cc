// Processes that become a rank of a running buffer: in place of one that has gone, or as one more.
// The others run on, and from one operation on, the same for all, it is there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include "support/exchange.h"

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

struct Cases {
  Scenario all;
  Scenario rest;
  explicit Cases(const Shape& shape, int newcomer = kNewcomer)
      : all(make_scenario(shape)), rest(without(all, {newcomer})) {}
};

BufferOptions open_for(const Shape& shape, const std::string& door) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  options.door = door;
  return options;
}

// A pair of operations, judged by who took part. A rank that is lost in the middle of a pair makes
// two mixed results, which are not looked at here.
class Pairs {
 public:
  Pairs(Rank& rank, const Cases& cases, const Buffer& buffer, int newcomer)
      : newcomer_(newcomer), all_(rank, cases.all, buffer), rest_(rank, cases.rest, buffer) {}

  // Was the newcomer there?
  bool run(Buffer& buffer) {
    const bool was_there = buffer.active()[newcomer_];
    all_.dispatch(buffer);
    all_.finish_dispatch();
    const bool is_there = all_.result().handle.active()[newcomer_];
    Exchange& fitting = is_there ? all_ : rest_;
    fitting.result() = all_.result();
    if (is_there || !was_there) fitting.check_received();
    fitting.provide_outputs(buffer);
    fitting.combine(buffer);
    fitting.finish_combine();
    const bool still_there = fitting.result().handle.active()[newcomer_];
    if (is_there == still_there && (is_there || !was_there)) fitting.check_combined();
    return still_there;
  }

 private:
  int newcomer_;
  Exchange all_;
  Exchange rest_;
};

constexpr int kPairs = 4;  // that all run with the newcomer

// The others: run pairs, without and then with it; the lowest lets it in.
void receive_newcomer(Rank& rank, Pairs& pairs, Buffer& buffer, int newcomer) {
  bool was_away = false;
  int together = 0;
  const auto start = std::chrono::steady_clock::now();
  while (together < kPairs && std::chrono::steady_clock::now() - start < 30s) {
    if (buffer.rank() == 0) {
      for (const int waiting : buffer.waiting()) {
        rank.expect_equal(waiting, newcomer, "who waits");
        buffer.unmask(waiting);
      }
    }
    const bool is_there = pairs.run(buffer);
    was_away = was_away || !is_there;
    if (was_away && is_there) ++together;
  }
  rank.expect_equal(together, kPairs, "pairs with the newcomer");
}

void be_newcomer(Rank& everyone, const Cases& cases, const BufferOptions& options, int newcomer) {
  Rank rank(everyone.communicator(), newcomer);
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      Buffer buffer = Buffer::join(newcomer, options);
      rank.expect_equal(buffer.rank(), newcomer, "rank");
      rank.expect_equal(buffer.num_ranks(), cases.all.shape.num_ranks, "ranks");
      Pairs pairs(rank, cases, buffer, newcomer);
      for (int pair = 0; pair < kPairs; ++pair) {
        rank.expect(pairs.run(buffer), "it is there");
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
  const Cases cases(shape);
  const std::string name = fresh_name("replacement");
  const int size = shape.num_ranks;
  run_ranks(size + 1, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    options.first_epoch = first_epoch;
    if (everyone.index() == size) {
      be_newcomer(everyone, cases, options, kNewcomer);
      return;
    }
    Rank rank = member(everyone, name, size);
    Buffer buffer(rank.communicator(), options);
    Pairs pairs(rank, cases, buffer, kNewcomer);
    for (int pair = 0; pair < 3; ++pair) rank.expect(pairs.run(buffer), "all are there");
    if (rank.index() != kNewcomer) receive_newcomer(rank, pairs, buffer, kNewcomer);
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

TEST(Rejoin, RankThatHasLeftIsReplacedWhileTheOthersRunOn) {
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
  for (const int present : {1, 2}) {
    const Shape shape = entangled(present + 1);
    const Cases cases(shape, present);
    const std::string name = fresh_name("growth");
    run_ranks(present + 1, [&](Rank& everyone) {
      BufferOptions options = open_for(shape, name);
      options.max_ranks = present + 1;
      if (everyone.index() == present) {
        be_newcomer(everyone, cases, options, present);
        return;
      }
      Rank rank = member(everyone, name, present);
      Buffer buffer(rank.communicator(), options);
      rank.expect_equal(buffer.num_ranks(), present + 1, "ranks that there may be");
      rank.expect(!buffer.active()[present], "the last is not there yet");
      Pairs pairs(rank, cases, buffer, present);
      receive_newcomer(rank, pairs, buffer, present);
      everyone.expect(rank.failures().empty(), rank.failures());
    });
  }
}

// A rank that has never been there has said nothing of operation 0 either.
TEST(Rejoin, FirstOperationOfANewRankMayBeTheOneAfterTheWrap) {
  const Shape shape = entangled(2);
  const Cases cases(shape);
  const std::string name = fresh_name("wrap");
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    options.max_ranks = 2;
    options.first_epoch = 0xfffffffeU;  // a rank is let in for the operation after the next
    if (everyone.index() == kNewcomer) {
      be_newcomer(everyone, cases, options, kNewcomer);
      return;
    }
    Rank rank = member(everyone, name, 1);
    Buffer buffer(rank.communicator(), options);
    Pairs pairs(rank, cases, buffer, kNewcomer);
    while (buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
    receive_newcomer(rank, pairs, buffer, kNewcomer);
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

// Again and again, and nothing is left behind in those that stay.
TEST(Rejoin, TurnoverLeaksNothing) {
  constexpr int kTurns = 5;
  const Shape shape = entangled(2);
  const Cases cases(shape);
  const std::string name = fresh_name("turnover");
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = open_for(shape, name);
    Rank rank = member(everyone, name, 2);
    auto buffer = std::make_unique<Buffer>(rank.communicator(), options);
    auto pairs = std::make_unique<Pairs>(rank, cases, *buffer, kNewcomer);
    rank.expect(pairs->run(*buffer), "both are there");
    if (rank.index() == kNewcomer) {
      pairs.reset();
      buffer.reset();
      for (int turn = 0; turn < kTurns; ++turn) be_newcomer(rank, cases, options, kNewcomer);
    } else {
      const auto num_mappings = [] {
        std::ifstream maps("/proc/self/maps");
        int count = 0;
        for (std::string line; std::getline(maps, line);) {
          if (line.find("memfd:tandem") != std::string::npos) ++count;
        }
        return count;
      };
      receive_newcomer(rank, *pairs, *buffer, kNewcomer);
      const int mappings = num_mappings();
      for (int turn = 1; turn < kTurns; ++turn) {
        receive_newcomer(rank, *pairs, *buffer, kNewcomer);
      }
      if (ranks_are_processes()) rank.expect_equal(num_mappings(), mappings, "mappings");
    }
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

// Killed at any moment, for real; only where ranks are processes.
TEST(Rejoin, KilledRankIsReplaced) {
  if (!ranks_are_processes()) return;
  const Shape shape = entangled(3);
  const Cases cases(shape);
  for (int trial = 0; trial < 4; ++trial) {
    const std::string name = fresh_name("killed");
    const auto exits = run_processes(4, [&](const Communicator& launched) {
      Rank everyone(launched);
      const BufferOptions options = open_for(shape, name);
      if (everyone.index() == 3) {
        be_newcomer(everyone, cases, options, kNewcomer);
      } else {
        Rank rank = member(everyone, name, 3);
        Buffer buffer(rank.communicator(), options);
        Pairs pairs(rank, cases, buffer, kNewcomer);
        if (rank.index() == kNewcomer) {
          std::thread([trial] {
            std::this_thread::sleep_for(trial * 700us);
            ::raise(SIGKILL);
          }).detach();
          for (;;) pairs.run(buffer);
        }
        receive_newcomer(rank, pairs, buffer, kNewcomer);
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
