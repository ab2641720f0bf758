// Arguments that differ while their hashes agree: a hash of 28 bits has such pairs, and CPU ranks
// compare the arguments themselves.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "layout/control_word.h"
#include "support/exchange.h"

namespace tandem::test {
namespace {

struct Choice {
  int max_tokens;
  int row_alignment;
};

constexpr int kHidden = 8;
constexpr int kTopk = 2;

std::uint32_t hash_of(Choice choice) {
  const std::uint32_t arguments[layout::kNumArguments] = {
      static_cast<std::uint32_t>(choice.max_tokens),
      layout::encode(layout::ShapeArgument{.hidden = kHidden,
                                           .topk = kTopk,
                                           .element = 0,
                                           .placement = Placement::kPacked,
                                           .layout = Layout::kPacked}),
      static_cast<std::uint32_t>(choice.row_alignment)};
  return layout::hash_arguments(arguments);
}

std::optional<std::pair<Choice, Choice>> find_collision() {
  std::unordered_map<std::uint32_t, Choice> seen;
  for (int max_tokens = 1; max_tokens <= 64; ++max_tokens) {
    for (int row_alignment = 1; row_alignment <= 4096; ++row_alignment) {
      const Choice choice{max_tokens, row_alignment};
      const auto [other, is_new] = seen.emplace(hash_of(choice), choice);
      if (!is_new) return std::pair(other->second, choice);
    }
  }
  return std::nullopt;
}

TEST(CpuArguments, ThatDifferAreAMismatchEvenIfTheirHashesAgree) {
  const auto collision = find_collision();
  ASSERT_TRUE(collision);
  const Choice choices[2] = {collision->first, collision->second};
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), {.num_experts = 2, .max_tokens = 64, .max_hidden = kHidden});
    const Choice choice = choices[rank.index()];
    rank.expect_error(ErrorCode::kMismatch, {"rank " + std::to_string(1 - rank.index())}, [&] {
      buffer.dispatch(ConstTensorView(nullptr, DType::kBFloat16, {0, kHidden}),
                      ConstTensorView(nullptr, DType::kInt32, {0, kTopk}),
                      {.layout = Layout::kPacked,
                       .row_alignment = choice.row_alignment,
                       .max_tokens = choice.max_tokens});
    });
    rank.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
