// What a process is told that is to become a rank of a buffer on several hosts: it is refused, or
// names ranks that can be, each once, and says the same when it is told on.
#include <cstring>

#include "backend/net/invitation.h"
#include "fuzz/check.h"
#include "runtime/situation.h"
#include "tandem/types.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;

// What somebody honest would say, some of it changed or cut off.
std::vector<std::byte> distorted(FuzzedDataProvider& data, std::vector<std::byte> bytes) {
  const int num_lies = data.ConsumeIntegralInRange(0, 3);
  for (int i = 0; i < num_lies && bytes.size() >= sizeof(std::uint32_t); ++i) {
    const auto at =
        data.ConsumeIntegralInRange<std::size_t>(0, bytes.size() - sizeof(std::uint32_t));
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    word = fuzz::awkward<std::uint32_t>(data, word);
    std::memcpy(bytes.data() + at, &word, sizeof word);
  }
  if (data.ConsumeBool()) {
    bytes.resize(data.ConsumeIntegralInRange<std::size_t>(0, bytes.size()));
    bytes.shrink_to_fit();  // its end is where the sanitizer looks
  }
  return bytes;
}

void check_situation(const std::vector<std::byte>& bytes) {
  const auto situation = runtime::decode_situation(bytes);
  if (!situation) return;
  check(situation->num_ranks() >= 1 && situation->num_ranks() <= kMaxRanks, "there are ranks");
  check(situation->teller >= 0 && situation->teller < situation->num_ranks(), "one of them tells");
  check(situation->from.size() == situation->active.size(), "each has an epoch");
  check(runtime::encode(*situation) == bytes, "nothing is taken for something else");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  runtime::Situation situation{.teller = data.ConsumeIntegralInRange(0, 3),
                               .number = data.ConsumeIntegral<std::uint32_t>(),
                               .num_starts = 1,
                               .near = data.ConsumeIntegral<std::uint32_t>(),
                               .active = {},
                               .from = {},
                               .options = "num_experts 4\n"};
  net::Invitation invitation{.channel = 1, .book = {}, .situation = {}};
  for (int rank = 0; rank < 4; ++rank) {
    situation.active.push_back(data.ConsumeBool());
    situation.from.push_back(data.ConsumeIntegral<std::uint32_t>());
    if (data.ConsumeBool()) continue;
    const auto address = data.ConsumeIntegralInRange<std::size_t>(1, 20);
    invitation.book.push_back(
        {.rank = rank, .token = 7, .address = std::vector<std::byte>(address)});
  }
  invitation.situation = runtime::encode(situation);
  check_situation(distorted(data, invitation.situation));
  const std::vector<std::byte> told = distorted(data, net::encode(invitation));
  if (const auto heard = net::decode_invitation(told)) {
    int last = -1;
    for (const net::Acquaintance& each : heard->book) {
      check(each.rank > last && each.rank < kMaxRanks, "each rank comes once");
      check(!each.address.empty(), "and has an address");
      last = each.rank;
    }
    check(net::encode(*heard) == told, "nothing is taken for something else");
    check_situation(heard->situation);
  }
  return 0;
}
