// Ranks that meet at an address: who is let in, and what is said to those who are not. All on one
// host, where ranks share memory once they have met.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <barrier>
#include <thread>
#include <vector>

#include "backend/net/unused_port.h"
#include "runtime/bootstrap.h"
#include "runtime/launch.h"
#include "runtime/network.h"
#include "support/hosts.h"
#include "tandem/communicator.h"

namespace tandem::runtime {
namespace {

using namespace std::chrono_literals;

std::string free_address() { return "127.0.0.1:" + std::to_string(test::unused_port()); }

struct Joining {
  int rank = 0;
  int size = 2;
  std::string secret = "the same";
  std::chrono::milliseconds timeout{20'000};
  bool last = false;  // comes when all but rank 0 have an answer
};

std::vector<Outcome> meet_all(const std::vector<Joining>& ranks) {
  const std::string address = free_address();
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].last) {
      for (std::size_t k = 1; k < threads.size(); ++k) threads[k].join();
      threads.resize(1);
    }
    threads.emplace_back([&, i] {
      const Joining& joining = ranks[i];
      try {
        outcomes[i].communicator = Communicator::connect_across_hosts(
            address, joining.secret, joining.rank, joining.size, {.timeout = joining.timeout});
      } catch (const Error& error) {
        outcomes[i].error = error;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

TEST(Meeting, RanksOfOneHostShareMemoryOnceTheyHaveMet) {
  const auto outcomes =
      meet_all({{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 2, .size = 3}});
  for (const Outcome& outcome : outcomes) {
    ASSERT_FALSE(outcome.error) << outcome.error->what();
    EXPECT_TRUE(outcome.communicator->bootstrap()->in_one_process());
    EXPECT_EQ(outcome.communicator->bootstrap()->network(), nullptr);
  }
}

TEST(Meeting, WhoDoesNotKnowTheSecretIsToldSoAndTheOthersMeet) {
  const auto outcomes = meet_all({{.rank = 0},
                                  {.rank = 1, .secret = "a guess"},
                                  {.rank = 1, .secret = ""},
                                  {.rank = 1, .last = true}});
  EXPECT_FALSE(outcomes[0].error) << outcomes[0].error->what();
  expect_error(outcomes[1], ErrorCode::kInvalidArgument, -1, {"another secret"});
  expect_error(outcomes[2], ErrorCode::kInvalidArgument, -1, {"secret is empty"});
  EXPECT_FALSE(outcomes[3].error) << outcomes[3].error->what();
}

TEST(Meeting, RanksThatDoNotComeAreNamedToThoseWhoDid) {
  const auto outcomes = meet_all({{.rank = 0, .size = 4, .timeout = 2s}, {.rank = 2, .size = 4}});
  for (const Outcome& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kTimeout, 1, {"ranks 1 and 3 of 4 did not come"});
  }
}

TEST(Meeting, TheShortestTimeoutCounts) {
  const auto outcomes = meet_all({{.rank = 0, .size = 3}, {.rank = 1, .size = 3, .timeout = 2s}});
  for (const Outcome& outcome : outcomes) {
    expect_error(outcome, ErrorCode::kTimeout, 2, {"rank 2 of 3 did not come"});
  }
}

TEST(Meeting, Rank0ThatDoesNotComeIsNamed) {
  const auto outcomes = meet_all({{.rank = 1, .timeout = 300ms}});
  expect_error(outcomes[0], ErrorCode::kTimeout, 0, {"rank 0 of 2 did not come"});
}

TEST(Meeting, ContradictionsAreToldToAll) {
  const auto sizes = meet_all({{.rank = 0, .size = 3}, {.rank = 1, .size = 2}});
  for (const Outcome& outcome : sizes) {
    expect_error(outcome, ErrorCode::kInvalidArgument, 1, {"rank 1 says that there are 2 ranks"});
  }
  const auto twice =
      meet_all({{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 1, .size = 3}});
  for (const Outcome& outcome : twice) {
    expect_error(outcome, ErrorCode::kInvalidArgument, 1,
                 {"two processes say that they are rank 1"});
  }
}

TEST(Meeting, AddressesThatMakeNoSenseAreRefused) {
  for (const char* const address : {"nowhere", "host:", ":7000", "127.0.0.1:http", ""}) {
    for (const int rank : {0, 1}) {
      const auto error =
          error_of([&] { Communicator::connect_across_hosts(address, "s", rank, 2); });
      ASSERT_TRUE(error) << address;
      EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument) << error->what();
    }
  }
}

TEST(Meeting, AnAddressThatIsTakenIsRank0sError) {
  const std::string address = free_address();
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in taken{};
  taken.sin_family = AF_INET;
  taken.sin_port =
      htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1))));
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&taken), sizeof taken), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  const auto error = error_of([&] { Communicator::connect_across_hosts(address, "s", 0, 2); });
  close(fd);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kResource);
  EXPECT_NE(std::string(error->what()).find(address), std::string::npos) << error->what();
}

// A rank that has the result of a round does something else then, here wait for the others. These
// must hear from it all the same.
TEST(Meeting, AResultArrivesThoughRanksThatHaveItDoNothingForTheMeeting) {
  constexpr int kSize = 5;
  constexpr int kRounds = 4;
  for (int meeting = 0; meeting < 10; ++meeting) {
    const std::string address = free_address();
    std::barrier all_have_it(kSize);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank) {
      threads.emplace_back([&, rank] {
        const auto gather = network()->meet(address, "secret", rank, kSize, 20s);
        for (int round = 0; round < kRounds; ++round) {
          const std::vector own{static_cast<std::byte>(kRounds * rank + round)};
          const auto error = error_of([&] {
            const auto messages = gather(own);
            for (int peer = 0; peer < kSize; ++peer) {
              EXPECT_EQ(messages.at(peer),
                        std::vector{static_cast<std::byte>(kRounds * peer + round)});
            }
          });
          EXPECT_FALSE(error) << "rank " << rank << ", round " << round << ": " << error->what();
          all_have_it.arrive_and_wait();
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(Meeting, OneRankNeedsNoAddress) {
  const auto communicator = Communicator::connect_across_hosts("127.0.0.1:1", "s", 0, 1);
  EXPECT_EQ(communicator.size(), 1);
}

}  // namespace
}  // namespace tandem::runtime
