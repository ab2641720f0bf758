// The judge of a soak finds what is wrong, and lets pass what losses may lead to.
#include "soak/judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace tandem::tools {
namespace {

// Of rank 0, in a dispatch and a combine in which its first expert receives rows, and it receives
// some of rank 1: `spoil` may change what was received, `spoil_out` what was combined. `present`
// and `possible`: as the judge is told, while both ranks take part.
struct Verdicts {
  std::string received;
  std::string combined;
};

Verdicts judge_one(const std::function<void(const DispatchResult&)>& spoil,
                   const std::function<void(TensorView)>& spoil_out, const Present& present,
                   const Present& possible = {true, true}) {
  const SoakOptions options{.ranks = 2, .timeout = std::chrono::seconds(20), .seed = 6};
  const SessionPlan plan = draw_session(options, options.seed, std::chrono::seconds(1));
  Verdicts verdicts;
  bool is_over = false;  // written before a barrier, by rank 0
  run_threads(2, [&](const Communicator& communicator) {
    const Memory memory(Backend::kCpu);
    Buffer buffer(communicator, plan.buffer);
    Judge judge(memory, communicator.rank());
    for (const SoakCase& one : plan.cases) {
      const reference::RankOutput dispatched = reference::dispatch(one.inputs.problem)[0];
      const bool serves = !dispatched.counts.empty() && dispatched.counts[0] > 0 &&
                          std::ranges::count(dispatched.source_ranks, 1) > 0 &&
                          one.inputs.problem.ranks[0].num_tokens > 0;
      if (!serves || one.combination.zero_copy) continue;
      Operation operation(buffer, memory, one.combination, one.inputs);
      operation.dispatch(0);
      operation.received(0).hook();
      const bool judged = communicator.rank() == 0;
      if (judged) spoil(operation.received(0));
      std::string why;
      const Outcome* outcome = judge.received(
          one, operation.received(0), judged ? present : Present{true, true}, possible, why);
      if (judged) verdicts.received = why;
      if (outcome == nullptr)
        outcome = judge.received(one, operation.received(0), {true, true}, {true, true}, why);
      if (outcome == nullptr) is_over = true;  // rank 0 has what it wanted to know
      communicator.barrier();
      if (is_over) return;
      const auto rank = static_cast<std::size_t>(communicator.rank());
      const reference::RankOutput& rows = outcome->received[rank];
      if (rows.num_rows > 0) {
        memory.upload(rows_of(operation.y(0), 0, rows.num_rows), outcome->y[rank].data());
      }
      operation.combine(0);
      operation.combine_hook()();
      if (judged) spoil_out(operation.out());
      const std::string wrong = judge.combined(one, *outcome, operation.out(), {true, true});
      if (judged) verdicts.combined = wrong;
      return;
    }
    throw std::runtime_error("no case serves");
  });
  return verdicts;
}

const auto kAsItIs = [](const auto&) {};

TEST(SoakJudge, AcceptsWhatIsRight) {
  const Verdicts verdicts = judge_one(kAsItIs, kAsItIs, {true, true});
  EXPECT_EQ(verdicts.received, "");
  EXPECT_EQ(verdicts.combined, "");
}

TEST(SoakJudge, FindsAFlippedBit) {
  const Verdicts combined = judge_one(
      kAsItIs, [](TensorView out) { *out.as<std::byte>() ^= std::byte{1}; }, {true, true});
  EXPECT_NE(combined.combined.find("combined byte 0"), std::string::npos) << combined.combined;
  const Verdicts received = judge_one(
      [](const DispatchResult& result) {
        *result.x.as<std::byte>() ^= std::byte{1};  // expert 0 has received rows
      },
      kAsItIs, {true, true});
  EXPECT_NE(received.received.find("is wrong"), std::string::npos) << received.received;
}

TEST(SoakJudge, FindsAWrongCount) {
  const Verdicts verdicts = judge_one(
      [](const DispatchResult& result) { ++*static_cast<std::int32_t*>(result.counts.data); },
      kAsItIs, {true, true});
  EXPECT_NE(verdicts.received.find("counts differ"), std::string::npos) << verdicts.received;
}

// Rows of a rank that was lost in mid-dispatch may lie where they would with it, and be zeros of
// token -1; those of others may not.
TEST(SoakJudge, AcceptsLostRowsOfALostRankOnly) {
  const auto lose_all_rows = [](const DispatchResult& result) {
    const auto rows = rows_of(result.x, 0, result.source_tokens.shape[0]);
    for (std::int64_t row = 0; row < rows.shape[0]; ++row) {
      std::memset(rows.as<std::byte>() + row * rows.strides[0] * size_of(rows.dtype), 0,
                  static_cast<std::size_t>(rows.shape[1]) * size_of(rows.dtype));
      result.source_tokens.as<std::int32_t>()[row] = -1;
    }
    if (!result.scales.has_value()) return;
    const auto scales = rows_of(result.scales, 0, rows.shape[0]);
    for (std::int64_t row = 0; row < scales.shape[0]; ++row) {
      std::memset(scales.as<std::byte>() + row * scales.strides[0] * 4, 0,
                  static_cast<std::size_t>(scales.shape[1]) * 4);
    }
  };
  EXPECT_EQ(judge_one(kAsItIs, kAsItIs, {false, false}).received, "");
  EXPECT_EQ(judge_one(lose_all_rows, kAsItIs, {false, false}).received, "");
  EXPECT_NE(judge_one(lose_all_rows, kAsItIs, {true, true}).received, "");
}

TEST(SoakJudge, CountsOfALostRankAreThoseOfOneThatMayHaveBeenThere) {
  EXPECT_EQ(judge_one(kAsItIs, kAsItIs, {true, false}).received, "");
  const Verdicts verdicts = judge_one(kAsItIs, kAsItIs, {true, false}, {true, false});
  EXPECT_NE(verdicts.received.find("counts differ"), std::string::npos) << verdicts.received;
}

}  // namespace
}  // namespace tandem::tools
