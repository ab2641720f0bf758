// Processes that become a rank of a running buffer: in place of one that has gone, or as one more.
// The others run on, and from one operation on, the same for all, it is there.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <thread>
#include <vector>

#include "support/doors.h"
#include "support/party.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kNewcomer = 1;  // the rank that goes and comes

Shape entangled(int num_ranks) {
  return {.num_ranks = num_ranks,
          .num_experts = 2 * num_ranks + 1,
          .hidden = 72,
          .topk = 4,
          .max_tokens = 8,
          .routing = Routing::kFull};
}

// On CPUs; on GPUs of one host, if they are not threads of one process.
bool may_join() {
  const bool is_cpu = backend_under_test() == Backend::kCpu;
  if (is_cpu || (ranks_share_memory() && ranks_are_processes())) return true;
  std::cout << "not run: ranks on GPUs can be replaced on one host, where they are processes"
            << std::endl;
  return false;
}

BufferOptions masking(const Shape& shape) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  return options;
}

constexpr int kPairs = 4;           // that all run with the newcomer
constexpr auto kLongEnough = 120s;  // for a newcomer to be there, on a busy machine too

// The others: run pairs, without and then with it; the lowest lets it in.
void receive_newcomer(Rank& rank, Party& party, Buffer& buffer, int newcomer) {
  bool was_away = false;
  int together = 0;
  const auto start = std::chrono::steady_clock::now();
  while (together < kPairs && std::chrono::steady_clock::now() - start < kLongEnough) {
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

void be_newcomer(Rank& everyone, const Oracles& oracles, const BufferOptions& closed,
                 const Doors& doors, int newcomer) {
  const BufferOptions options = doors.open(closed, everyone, newcomer);
  Rank rank(everyone.communicator(), newcomer);
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      Buffer buffer = doors.join(newcomer, options);
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
      const auto waited = std::chrono::steady_clock::now() - start;
      if (error.code() != ErrorCode::kOrder || waited > kLongEnough) throw;
      std::this_thread::sleep_for(1ms);
    }
  }
}

void run_replacement(const Shape& shape, std::uint32_t first_epoch) {
  const Oracles oracles(shape);
  const int size = shape.num_ranks;
  const Doors doors("replacement", size);
  run_ranks(size + 1, [&](Rank& everyone) {
    BufferOptions options = masking(shape);
    options.first_epoch = first_epoch;
    if (everyone.index() == size) {
      be_newcomer(everyone, oracles, options, doors, kNewcomer);
      return;
    }
    Rank rank(doors.connect(everyone, size));
    Buffer buffer(rank.communicator(), doors.open(options, everyone, rank.index()));
    Party party(rank, oracles, buffer);
    for (int pair = 0; pair < 3; ++pair) {
      const Present present = party.run(
          buffer, [&] { rank.expect(party.handle().active()[kNewcomer], "all are there"); });
      // In the last combine another may be done, go on and miss it while this one still adds up.
      rank.expect(pair == 2 || present[kNewcomer], "all are there until the last combine");
    }
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
  // A single rank is on one host.
  for (const int present : ranks_share_memory() ? std::vector{1, 2} : std::vector{2, 3}) {
    const Shape shape = entangled(present + 1);
    const Oracles oracles(shape);
    const Doors doors("growth", present + 1);
    run_ranks(present + 1, [&](Rank& everyone) {
      BufferOptions options = masking(shape);
      options.max_ranks = present + 1;
      if (everyone.index() == present) {
        be_newcomer(everyone, oracles, options, doors, present);
        return;
      }
      Rank rank(doors.connect(everyone, present));
      Buffer buffer(rank.communicator(), doors.open(options, everyone, rank.index()));
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
  const int present = ranks_share_memory() ? 1 : 2;
  const Shape shape = entangled(present + 1);
  const Oracles oracles(shape);
  const Doors doors("wrap", present + 1);
  run_ranks(present + 1, [&](Rank& everyone) {
    BufferOptions options = masking(shape);
    options.max_ranks = present + 1;
    options.first_epoch = 0xfffffffeU;  // a rank is let in for the operation after the next
    if (everyone.index() == present) {
      be_newcomer(everyone, oracles, options, doors, present);
      return;
    }
    Rank rank(doors.connect(everyone, present));
    Buffer buffer(rank.communicator(), doors.open(options, everyone, rank.index()));
    Party party(rank, oracles, buffer);
    // The one that lets it in; the others wait for that one.
    while (rank.index() == 0 && buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
    receive_newcomer(rank, party, buffer, present);
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

// Files and sockets of this process; those of a network may close a moment late.
int num_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

int num_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tandem") != std::string::npos) ++count;
  }
  return count;
}

// Again and again, and nothing is left behind in those that stay.
TEST(Rejoin, TurnoverLeaksNothing) {
  if (!may_join()) return;
  constexpr int kTurns = 5;
  const Shape shape = entangled(2);
  const Oracles oracles(shape);
  const Doors doors("turnover", 2);
  run_ranks(2, [&](Rank& everyone) {
    const BufferOptions options = masking(shape);
    std::optional<Communicator> communicator(doors.connect(everyone, 2));
    Rank rank(everyone.communicator());
    std::optional<Buffer> buffer(std::in_place, *communicator,
                                 doors.open(options, everyone, rank.index()));
    std::optional<Party> party(std::in_place, rank, oracles, *buffer);
    rank.expect(party->run(*buffer)[kNewcomer], "both are there");
    if (rank.index() == kNewcomer) {
      party.reset();
      buffer.reset();
      communicator.reset();
      for (int turn = 0; turn < kTurns; ++turn) {
        be_newcomer(rank, oracles, options, doors, kNewcomer);
      }
    } else {
      receive_newcomer(rank, *party, *buffer, kNewcomer);
      receive_newcomer(rank, *party, *buffer, kNewcomer);
      const int mappings = num_mappings();
      const int descriptors = num_descriptors();
      for (int turn = 2; turn < kTurns; ++turn) {
        receive_newcomer(rank, *party, *buffer, kNewcomer);
      }
      if (ranks_are_processes()) {
        rank.expect_equal(num_mappings(), mappings, "mappings");
        const auto start = std::chrono::steady_clock::now();
        while (num_descriptors() > descriptors && std::chrono::steady_clock::now() - start < 10s) {
          std::this_thread::sleep_for(10ms);
        }
        rank.expect(num_descriptors() <= descriptors, "descriptors are left");
      }
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
    const Doors doors("killed", 3);
    const Shared<Gathering> all_have_buffers;
    run_ranks(4,
              [&](Rank& everyone) {
                const BufferOptions options = masking(shape);
                if (everyone.index() == 3) {
                  be_newcomer(everyone, oracles, options, doors, kNewcomer);
                  return;
                }
                Rank rank(doors.connect(everyone, 3));
                Buffer buffer(rank.communicator(), doors.open(options, everyone, rank.index()));
                Party party(rank, oracles, buffer);
                all_have_buffers->await(3);
                if (rank.index() == kNewcomer) {
                  std::thread([&everyone, trial] {
                    std::this_thread::sleep_for(trial * 700us);
                    everyone.die();
                  }).detach();
                  for (;;) party.run(buffer);
                }
                receive_newcomer(rank, party, buffer, kNewcomer);
                everyone.expect(rank.failures().empty(), rank.failures());
              },
              {.may_die = {kNewcomer}});
  }
}

TEST(Rejoin, IsRefusedWithAReason) {
  if (!may_join()) return;
  const Shape shape = entangled(2);
  const Doors doors("refused", 2);
  run_ranks(2, [&](Rank& everyone) {
    BufferOptions options = doors.open(masking(shape), everyone, everyone.index());
    options.timeout = with_patience(1s);
    // As the other rank: what it listens at is free.
    BufferOptions other_options = options;
    other_options.door_address = "";
    everyone.expect_error(ErrorCode::kInvalidArgument, {"door is empty"}, [&] {
      BufferOptions closed = options;
      closed.door = closed.door_address = "";
      static_cast<void>(doors.join(0, closed));
    });
    everyone.expect_error(ErrorCode::kInvalidArgument, {"door", "control characters"}, [&] {
      BufferOptions odd = options;
      odd.door = "a\nb";
      static_cast<void>(Buffer::size_bytes(odd, 2));
    });
    if (everyone.index() == 0) {
      everyone.expect_error(ErrorCode::kTimeout, {"nobody opens", "door"},
                            [&] { static_cast<void>(doors.join(1, other_options)); });
    }
    everyone.barrier();
    std::optional<Communicator> communicator(doors.connect(everyone, 2));
    Rank rank(everyone.communicator());
    rank.expect_error(ErrorCode::kInvalidArgument, {"max_ranks is 1", "2"}, [&] {
      BufferOptions few = options;
      few.max_ranks = 1;
      Buffer buffer(*communicator, few);
    });
    std::optional<Buffer> buffer(std::in_place, *communicator, options);
    rank.barrier();
    if (rank.index() == 0) {
      rank.expect_error(ErrorCode::kOrder, {"rank 1", "another process is that rank"},
                        [&] { static_cast<void>(doors.join(1, other_options)); });
      rank.expect_error(ErrorCode::kMismatch, {"max_hidden", "rank 0", "rank 2"}, [&] {
        BufferOptions other = other_options;
        other.max_hidden = 1000;
        static_cast<void>(doors.join(2, other));
      });
      rank.expect_error(ErrorCode::kInvalidArgument, {"rank is 2", "[0, 2)"},
                        [&] { static_cast<void>(doors.join(2, other_options)); });
    }
    rank.barrier();
    if (!ranks_share_memory()) {
      rank.expect_error(ErrorCode::kInvalidArgument, {"rank 0", "another secret"}, [&] {
        static_cast<void>(doors.join_with_secret("a guess", 1, other_options));
      });
    }
    rank.barrier();
    if (rank.index() == 1) {
      buffer.reset();
      communicator.reset();
    }
    rank.barrier();
    if (rank.index() == 0) {
      rank.expect_error(ErrorCode::kTimeout, {"rank 1 is still active"},
                        [&] { static_cast<void>(doors.join(1, other_options)); });
      buffer->mask(1);
      rank.expect_error(ErrorCode::kTimeout, {"unmask(1)"},
                        [&] { static_cast<void>(doors.join(1, other_options)); });
      rank.expect(buffer->waiting().empty(), "nobody waits any more");
    }
    everyone.expect(rank.failures().empty(), rank.failures());
  });
}

}  // namespace
}  // namespace tandem::test
