// What kernels write for peers on other hosts: each part has room for what goes there.
#include "backend/cuda/outbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tandem::cuda {
namespace {

TEST(Outbox, HasRoomForEachPart) {
  const layout::Capacity capacity{.num_ranks = 5,
                                  .num_experts = 14,
                                  .max_local_experts = 4,
                                  .max_tokens = 7,
                                  .max_topk = 3,
                                  .num_arrival_words = 258,
                                  .dispatch_pitch = 2016};
  const layout::Block block(capacity);
  const Outbox outbox(block);
  struct Part {
    std::int64_t begin;
    std::int64_t end;
  };
  // Control words lie at their offsets in a block.
  std::vector<Part> parts = {{0, block.control_bytes()}};
  const auto add = [&](std::int64_t begin, std::int64_t size_bytes) {
    EXPECT_EQ(begin % 128, 0);
    parts.push_back({begin, begin + size_bytes});
  };
  add(outbox.ring(), sizeof(RequestRing));
  for (const int i : {0, 1}) {
    add(outbox.first_rows(i), 14 * 4);
    add(outbox.halves(i), 5 * 4);
    add(outbox.offsets(i), (4 + 1) * 8);
    add(outbox.ranges(i), 4 * 5 * 8);
    add(outbox.sources(i), 7 * 3 * 4);
    add(outbox.rows(i), 7 * 3 * 2016);
  }
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < parts.size(); ++i) EXPECT_GE(parts[i].begin, parts[i - 1].end) << i;
  EXPECT_LE(parts.back().end, outbox.size_bytes());
}

}  // namespace
}  // namespace tandem::cuda
