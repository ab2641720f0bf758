// What ranks report comes home, also from a rank that fails. (Ranks as processes: processes_test.)
#include "common/launch.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "common/lockstep.h"

namespace tandem::tools {
namespace {

constexpr std::chrono::milliseconds kTimeout{20'000};

TEST(RunRanks, KeepsEachRanksReportsInOrder) {
  const auto outcomes =
      run_ranks(Launch::kThreads, 3, kTimeout,
                [](const Communicator& communicator, const ReportFunction& report) {
                  report({{"rank", communicator.rank()}});
                  report({{"size", communicator.size()}});
                });
  ASSERT_EQ(outcomes.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(outcome.error, "");
    ASSERT_EQ(outcome.reports.size(), 2U);
    EXPECT_EQ(outcome.reports[0]["rank"], rank);
    EXPECT_EQ(outcome.reports[1]["size"], 3);
  }
}

TEST(RunRanks, TellsEveryRanksError) {
  const auto outcomes =
      run_ranks(Launch::kThreads, 2, kTimeout,
                [](const Communicator& communicator, const ReportFunction& report) {
                  report({{"before", true}});
                  throw std::runtime_error("rank " + std::to_string(communicator.rank()) + " fell");
                });
  ASSERT_EQ(outcomes.size(), 2U);
  EXPECT_EQ(outcomes[0].error, "rank 0 fell");
  EXPECT_EQ(outcomes[1].error, "rank 1 fell");
  EXPECT_EQ(outcomes[1].reports.size(), 1U);
}

TEST(Lockstep, FailureOnOneRankEndsTheStepForAll) {
  const auto outcomes =
      run_ranks(Launch::kThreads, 3, kTimeout,
                [](const Communicator& communicator, const ReportFunction& report) {
                  Lockstep lockstep(communicator);
                  const bool first = lockstep.step("first", [] {});
                  const bool second = lockstep.step("second", [&] {
                    if (communicator.rank() == 1) throw std::runtime_error("fell");
                  });
                  const bool third = lockstep.step("third", [] {});
                  report({first, second, third, lockstep.take_errors()});
                });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(outcomes[rank].error, "");
    const auto errors = rank == 1 ? nlohmann::json{"second: fell"} : nlohmann::json::array();
    EXPECT_EQ(outcomes[rank].reports[0], nlohmann::json::array({true, false, true, errors}));
  }
}

TEST(Lockstep, SubstepFailsTheStepAroundItOnAllRanksAndKeepsOneReason) {
  const auto outcomes =
      run_ranks(Launch::kThreads, 2, kTimeout,
                [](const Communicator& communicator, const ReportFunction& report) {
                  Lockstep lockstep(communicator);
                  bool went_on = false;
                  const bool well = lockstep.step("outer", [&] {
                    lockstep.substep("inner", [&] {
                      if (communicator.rank() == 0) throw std::runtime_error("fell");
                    });
                    went_on = true;
                  });
                  report({well, went_on, lockstep.take_errors()});
                });
  EXPECT_EQ(outcomes[0].reports[0],
            nlohmann::json::array({false, false, nlohmann::json{"inner: fell"}}));
  EXPECT_EQ(outcomes[1].reports[0], nlohmann::json::array({false, false, nlohmann::json::array()}));
}

TEST(Lockstep, LargestIsTheSameOnAllRanks) {
  const auto outcomes = run_ranks(Launch::kThreads, 3, kTimeout,
                                  [](const Communicator& communicator, const ReportFunction& tell) {
                                    Lockstep lockstep(communicator);
                                    tell(lockstep.largest(1.5 * communicator.rank()));
                                  });
  for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.reports[0], 3.0);
}

}  // namespace
}  // namespace tandem::tools
