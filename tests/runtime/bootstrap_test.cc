// Set-up exchanges between ranks as threads and as processes: what one implementation of Bootstrap
// promises, the other promises too.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <tuple>

#include "runtime/bootstrap.h"
#include "runtime/launch.h"
#include "runtime/symmetric_memory.h"
#include "tandem/communicator.h"

namespace tandem::runtime {
namespace {

class Bootstraps : public testing::TestWithParam<std::tuple<Launch, int>> {
 protected:
  [[nodiscard]] Launch launch() const { return std::get<0>(GetParam()); }
  [[nodiscard]] int num_ranks() const { return std::get<1>(GetParam()); }
};

TEST_P(Bootstraps, AllGatherGivesEveryMessageInRankOrder) {
  run(launch(), num_ranks(), [](const Communicator& communicator) {
    for (int round = 0; round < 20; ++round) {
      // Of different lengths, the first one empty.
      const std::string own(static_cast<std::size_t>(communicator.rank() * 100),
                            static_cast<char>('a' + round));
      const auto all = communicator.all_gather(bytes_of(own));
      require(static_cast<int>(all.size()) == communicator.size(), "one message a rank");
      for (int rank = 0; rank < communicator.size(); ++rank) {
        require(text_of(all[rank]) == std::string(static_cast<std::size_t>(rank * 100),
                                                  static_cast<char>('a' + round)),
                "the message of each rank");
      }
      communicator.barrier();
    }
  });
}

TEST_P(Bootstraps, LargeMessagesArriveWhole) {
  run(launch(), num_ranks(), [](const Communicator& communicator) {
    // More than a socket's buffer holds.
    const std::string own(500'000, static_cast<char>('A' + communicator.rank()));
    const auto all = communicator.all_gather(bytes_of(own));
    for (int rank = 0; rank < communicator.size(); ++rank) {
      require(text_of(all[rank]) == std::string(own.size(), static_cast<char>('A' + rank)),
              "the message of each rank");
    }
  });
}

TEST_P(Bootstraps, DescriptorsReferToTheFilesOfTheirRanks) {
  run(launch(), num_ranks(), [](const Communicator& communicator) {
    for (int round = 0; round < 3; ++round) {
      int ends[2];
      require(pipe(ends) == 0, "a pipe");
      const Descriptor read_end(ends[0]);
      const Descriptor write_end(ends[1]);
      const char own = static_cast<char>(communicator.rank());
      require(write(write_end.get(), &own, 1) == 1, "a byte written");
      const auto all = communicator.bootstrap()->all_gather_descriptors(read_end);
      require(static_cast<int>(all.size()) == communicator.size(), "one descriptor a rank");
      // Each rank reads its right neighbour's pipe.
      const int neighbour = (communicator.rank() + 1) % communicator.size();
      char seen = -1;
      require(read(all[neighbour].get(), &seen, 1) == 1, "a byte read");
      require(seen == static_cast<char>(neighbour), "the neighbour's byte");
      communicator.barrier();
    }
  });
}

TEST_P(Bootstraps, SymmetricMemoryIsSharedAndZeroed) {
  run(launch(), num_ranks(), [](const Communicator& communicator) {
    SymmetricMemory memory(*communicator.bootstrap(), 10'000);
    const int rank = communicator.rank();
    require(memory.size_bytes() == 10'000 && memory.num_ranks() == communicator.size(), "size");
    for (int peer = 0; peer < memory.num_ranks(); ++peer) {
      require(memory.block(peer)[9'999] == std::byte{0}, "zeros");
    }
    communicator.barrier();
    for (int peer = 0; peer < memory.num_ranks(); ++peer) {
      memory.block(peer)[rank] = static_cast<std::byte>(rank + 1);
    }
    communicator.barrier();
    for (int peer = 0; peer < memory.num_ranks(); ++peer) {
      require(memory.block(rank)[peer] == static_cast<std::byte>(peer + 1), "a peer's byte");
    }
  });
}

TEST_P(Bootstraps, DifferentExchangesAreReportedToAll) {
  if (num_ranks() == 1) return;
  std::atomic<int> num_reported = 0;
  run(launch(), num_ranks(), [&](const Communicator& communicator) {
    try {
      if (communicator.rank() == communicator.size() - 1) {
        communicator.barrier();
      } else {
        static_cast<void>(communicator.all_gather({}));
      }
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kMismatch, error.what());
      require(std::string(error.what()).find("barrier") != std::string::npos, error.what());
      require(std::string(error.what()).find("all_gather") != std::string::npos, error.what());
      ++num_reported;
      return;
    }
    throw std::runtime_error("no error");
  });
  if (launch() == Launch::kThreads) {
    EXPECT_EQ(num_reported, num_ranks());
  }
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<Launch, int>>& info) {
  return name_of(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(All, Bootstraps,
                         testing::Combine(testing::Values(Launch::kThreads, Launch::kProcesses),
                                          testing::Values(1, 2, 3, 5, 8, 16)),
                         name_of_case);

}  // namespace
}  // namespace tandem::runtime
