// What a soak draws: alike for one seed, and of every kind.
#include "soak/draw.h"

#include <gtest/gtest.h>

#include <set>

namespace tandem::tools {
namespace {

SessionPlan draw(std::uint64_t seed) {
  static const SoakOptions options{.ranks = 3, .timeout = std::chrono::seconds(1)};
  return draw_session(options, seed, std::chrono::seconds(1));
}

TEST(SoakDraw, FollowsFromTheSeed) {
  const SessionPlan one = draw(7);
  const SessionPlan same = draw(7);
  ASSERT_EQ(one.cases.size(), same.cases.size());
  for (std::int64_t pair = 0; pair < 100; ++pair) {
    ASSERT_EQ(one.at(pair), same.at(pair));
    EXPECT_EQ(one.replays(pair), same.replays(pair));
    const SoakCase& a = one.cases[one.at(pair)];
    const SoakCase& b = same.cases[same.at(pair)];
    EXPECT_EQ(describe(a.combination), describe(b.combination));
    EXPECT_EQ(a.in_recording, b.in_recording);
    EXPECT_EQ(a.inputs.problem.ranks[0].x, b.inputs.problem.ranks[0].x);
  }
}

TEST(SoakDraw, MixesWhateverThereIs) {
  std::set<std::string> formats, ways;
  std::set<int> hidden;
  bool without_tokens = false;
  for (std::uint64_t seed = 1; seed < 6; ++seed) {
    const SessionPlan plan = draw(seed);
    for (const SoakCase& one : plan.cases) {
      const Combination& drawn = one.combination;
      formats.insert(std::string(name(drawn.format)));
      ways.insert(std::to_string(static_cast<int>(drawn.placement)) +
                  std::to_string(static_cast<int>(drawn.layout)) + (drawn.zero_copy ? "z" : "-") +
                  (drawn.hook ? "h" : "-"));
      hidden.insert(one.inputs.problem.hidden);
      EXPECT_LE(one.inputs.problem.hidden, plan.buffer.max_hidden);
      EXPECT_LE(one.inputs.problem.topk, plan.buffer.max_topk);
      for (const auto& input : one.inputs.problem.ranks) without_tokens |= input.num_tokens == 0;
    }
  }
  EXPECT_EQ(formats.size(), 6U);
  EXPECT_EQ(ways.size(), 12U);  // packed 2 x 2, slotted 2 x 2 x 2
  EXPECT_GT(hidden.size(), 20U);
  EXPECT_TRUE(without_tokens);
}

}  // namespace
}  // namespace tandem::tools
