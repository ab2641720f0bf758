#include "runtime/situation.h"

#include <algorithm>

#include "core/bytes.h"
#include "tandem/types.h"

namespace tandem::runtime {
namespace {

// Then the ranks, then the text of the options.
struct Head {
  std::int32_t num_ranks;
  std::int32_t teller;
  std::uint32_t number;
  std::uint32_t num_starts;
  std::uint32_t near;
};

struct EncodedRank {
  std::uint32_t from;
  std::uint32_t is_active;
};

}  // namespace

std::vector<std::byte> encode(const Situation& situation) {
  std::vector<std::byte> bytes;
  core::append(bytes, Head{.num_ranks = situation.num_ranks(),
                           .teller = situation.teller,
                           .number = situation.number,
                           .num_starts = situation.num_starts,
                           .near = situation.near});
  for (std::size_t rank = 0; rank < situation.active.size(); ++rank) {
    core::append(bytes, EncodedRank{.from = situation.from[rank],
                                    .is_active = situation.active[rank] ? 1U : 0U});
  }
  core::append(bytes, std::span<const char>(situation.options));
  return bytes;
}

std::optional<Situation> decode_situation(std::span<const std::byte> bytes) {
  const auto head = core::take_front<Head>(bytes);
  if (!head || head->num_ranks < 1 || head->num_ranks > kMaxRanks || head->teller < 0 ||
      head->teller >= head->num_ranks) {
    return {};
  }
  Situation situation{.teller = head->teller,
                      .number = head->number,
                      .num_starts = head->num_starts,
                      .near = head->near,
                      .active = {},
                      .from = {},
                      .options = {}};
  for (int rank = 0; rank < head->num_ranks; ++rank) {
    const auto encoded = core::take_front<EncodedRank>(bytes);
    if (!encoded || encoded->is_active > 1) return {};
    situation.active.push_back(encoded->is_active != 0);
    situation.from.push_back(encoded->from);
  }
  situation.options.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return situation;
}

}  // namespace tandem::runtime
