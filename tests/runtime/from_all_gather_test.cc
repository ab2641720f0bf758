// Ranks that meet through a gathering function that the caller already has.
#include <gtest/gtest.h>

#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "runtime/bootstrap.h"
#include "runtime/launch.h"
#include "runtime/network.h"

namespace tandem::runtime {
namespace {

// A gathering function over threads, as torch.distributed's or mpi4py's would be over processes.
class Gathering {
 public:
  explicit Gathering(int size) : barrier_(size), messages_(static_cast<std::size_t>(size)) {}

  std::vector<std::vector<std::byte>> gather(int rank, std::span<const std::byte> message) {
    messages_[rank].assign(message.begin(), message.end());
    barrier_.arrive_and_wait();
    return messages_;
  }

 private:
  std::barrier<> barrier_;
  std::vector<std::vector<std::byte>> messages_;
};

TEST(FromAllGather, RanksMeetThroughTheCallersFunction) {
  for (const int size : {1, 2, 5}) {
    Gathering gathering(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        int num_calls = 0;
        const auto communicator =
            Communicator::from_all_gather(rank, size, [&](std::span<const std::byte> message) {
              ++num_calls;
              return gathering.gather(rank, message);
            });
        EXPECT_EQ(num_calls, 1);
        EXPECT_EQ(communicator.rank(), rank);
        const auto all = communicator.all_gather(bytes_of(std::to_string(rank)));
        for (int peer = 0; peer < size; ++peer) EXPECT_EQ(text_of(all[peer]), std::to_string(peer));
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(FromAllGather, ProcessesMeetThroughTheCallersFunction) {
  run(Launch::kProcesses, 4, [](const Communicator& outer) {
    const auto communicator = Communicator::from_all_gather(
        outer.rank(), outer.size(),
        [&](std::span<const std::byte> message) { return outer.all_gather(message); });
    require(communicator.rank() == outer.rank() && communicator.size() == 4, "rank and size");
    require(!communicator.bootstrap()->in_one_process(), "several processes");
    communicator.barrier();
  });
}

// What joins ranks on several hosts is tested in tests/backend/net.
TEST(FromAllGather, WithoutANetworkRanksOnOtherHostsAreAllNamed) {
  const auto error = error_of([] {
    Communicator::from_all_gather(0, 4, [](std::span<const std::byte> own) {
      std::vector<std::vector<std::byte>> all(4, {own.begin(), own.end()});
      all[1] = bytes_of("tandem another-boot/net:[1] name");
      all[3] = bytes_of("tandem another-boot/net:[2] name");
      return all;
    });
  });
  ASSERT_TRUE(error);
  if (network() != nullptr) {
    EXPECT_NE(std::string(error->what()).find("something else for rank 1"), std::string::npos)
        << error->what();
    return;
  }
  EXPECT_EQ(error->code(), ErrorCode::kUnreachable);
  EXPECT_EQ(error->peer(), 1);
  EXPECT_NE(std::string(error->what()).find("ranks 1 and 3"), std::string::npos) << error->what();
}

TEST(FromAllGather, AFunctionThatGathersNonsenseIsRefused) {
  using Messages = std::vector<std::vector<std::byte>>;
  for (const Messages& nonsense : {Messages{}, Messages(3), Messages(2, bytes_of("hello"))}) {
    const auto error = error_of([&] {
      Communicator::from_all_gather(0, 2, [&](std::span<const std::byte>) { return nonsense; });
    });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument) << error->what();
  }
  const auto error = error_of([] {
    Communicator::from_all_gather(2, 2, [](std::span<const std::byte>) { return Messages{}; });
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem::runtime
