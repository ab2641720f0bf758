#include "support/party.h"

#include <algorithm>

namespace tandem::test {
namespace {

// Does `all` hold whoever `some` holds?
bool includes(const Present& all, const Present& some) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (some[rank] && !all[rank]) return false;
  }
  return true;
}

bool is_zero(const std::vector<std::byte>& bytes, std::int64_t row, std::int64_t num_rows) {
  const std::int64_t width = std::ssize(bytes) / num_rows;
  const auto first = bytes.begin() + row * width;
  return std::all_of(first, first + width, [](std::byte byte) { return byte == std::byte{0}; });
}

// As compare_received, but rows of sources that are not in `present` may be zeros of token -1, all
// rows of a source alike.
std::string compare_what_is_left(const Scenario& scenario, int rank, const Present& present,
                                 const DispatchResult& result, void* stream, int& num_blank_rows) {
  num_blank_rows = 0;
  Scenario expected = scenario;
  reference::RankOutput& rows = expected.received[rank];
  const auto tokens = download_as<std::int32_t>(result.source_tokens, stream);
  const std::vector<std::byte> x = download(result.x, stream);
  const std::vector<std::byte> scales = download(result.scales, stream);
  const std::int64_t num_rows = std::ssize(tokens);
  std::vector<int> blank(present.size(), -1);  // by source: unknown, no, yes
  for (std::int64_t row = 0; row < std::min(rows.num_rows, num_rows); ++row) {
    const int source = rows.source_ranks[row];
    if (source < 0 || present[source]) continue;
    const bool is_blank = tokens[row] == -1;
    if (blank[source] < 0) blank[source] = is_blank ? 1 : 0;
    if (is_blank != (blank[source] == 1)) {
      return "rows of lost rank " + std::to_string(source) + " are blank only in part";
    }
    if (!is_blank) continue;
    if (!is_zero(x, row, num_rows) || (!scales.empty() && !is_zero(scales, row, num_rows))) {
      return "row " + std::to_string(row) + " of a lost rank is not zero";
    }
    rows.source_tokens[row] = -1;  // has been compared
    ++num_blank_rows;
  }
  return compare_received(expected, rank, result, stream);
}

}  // namespace

Present all_but(int num_ranks, const std::vector<int>& lost) {
  Present present(num_ranks, true);
  for (const int rank : lost) present[rank] = false;
  return present;
}

Oracles::Oracles(const Shape& shape) {
  const Scenario all = make_scenario(shape);
  for (unsigned bits = 1; bits < 1U << shape.num_ranks; ++bits) {
    std::vector<int> lost;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
      if ((bits >> rank & 1U) == 0) lost.push_back(rank);
    }
    scenarios_.emplace(all_but(shape.num_ranks, lost), lost.empty() ? all : without(all, lost));
  }
}

Party::Party(Rank& rank, const Oracles& oracles, Buffer& buffer)
    : rank_(rank), oracles_(oracles), buffer_(buffer) {
  rank.run_freely();
}

Exchange& Party::exchange(const Present& present) {
  std::unique_ptr<Exchange>& found = exchanges_[present];
  if (found == nullptr) {
    found = std::make_unique<Exchange>(rank_, oracles_.of(present), buffer_);
  }
  return *found;
}

Present Party::judge_received(const Present& present, const DispatchResult& result) {
  std::string report;
  if (!present[rank_.index()]) {
    rank_.fail("took no part in its own dispatch");
    return present;
  }
  for (const auto& [placed, scenario] : oracles_.scenarios()) {
    if (!includes(placed, present)) continue;
    const std::string difference = compare_what_is_left(scenario, rank_.index(), present, result,
                                                        rank_.stream(), num_blank_rows_);
    if (difference.empty()) return placed;
    report += "  " + difference;
  }
  rank_.fail("dispatch: what came is right for no set of ranks\n" + report);
  return present;
}

// Where rows lie follows from whoever they were placed by; who is not present contributes nothing.
void Party::judge_combined(const Present& placed, const Present& present, const Exchange& used) {
  const Scenario& scenario = oracles_.of(placed);
  Scenario expected = scenario;
  for (std::size_t owner = 0; owner < present.size(); ++owner) {
    if (present[owner]) continue;
    const std::vector<int>& experts = scenario.received[owner].experts;
    reference::RankInput& input = expected.problem.ranks[rank_.index()];
    for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
      const bool lost =
          std::find(experts.begin(), experts.end(), input.topk_idx[i]) != experts.end();
      if (lost) input.topk_weights[i] = 0;
    }
  }
  // Of ranks whose tokens were not received, the oracle knows no rows.
  for (std::size_t rank = 0; rank < placed.size(); ++rank) {
    for (std::int64_t& expert : expected.problem.ranks[rank].topk_idx) {
      for (std::size_t owner = 0; owner < placed.size(); ++owner) {
        const std::vector<int>& experts = scenario.received[owner].experts;
        if (!placed[owner] && std::find(experts.begin(), experts.end(), expert) != experts.end()) {
          expert = -1;
        }
      }
    }
    if (!placed[rank]) expected.problem.ranks[rank] = {};
  }
  expected.out = reference::combine(expected.problem, scenario.y, scenario.shape.combine_dtype);
  const std::string report = compare_combined(expected, rank_.index(), used.out(), rank_.stream());
  if (!report.empty()) rank_.fail("combine: " + report);
}

Present Party::run(Buffer& buffer) {
  return run(buffer, [] {});
}

Present Party::run(Buffer& buffer, const std::function<void()>& between) {
  Exchange& sender = exchange();
  sender.dispatch(buffer);
  handle_ = sender.result().handle;
  sender.finish_dispatch();
  const Present received = handle_.active();
  const Present placed = judge_received(received, sender.result());
  rank_.expect(sender.recv_x().guards_intact(rank_.stream()), "guards around recv_x overwritten");

  between();
  Exchange& receiver = exchange(placed);
  receiver.result() = sender.result();
  receiver.provide_outputs(buffer);
  receiver.combine(buffer);
  receiver.finish_combine();
  Present present = handle_.active();
  for (int rank = 0; rank < buffer_.num_ranks(); ++rank) {
    present[rank] = present[rank] && received[rank];
  }
  judge_combined(placed, present, receiver);
  rank_.expect(receiver.out_is_guarded(), "guards around out overwritten");
  return present;
}

void fail_together(Rank& rank, Party& party, Buffer& buffer) {
  Exchange& exchange = party.exchange();
  DispatchOptions options = exchange.dispatch_options();
  if (rank.index() == 0) options.row_alignment = 2;
  try {
    buffer.dispatch(exchange.x(), exchange.topk_idx(), options).hook();
    rank.fail("no mismatch");
  } catch (const Error& error) {
    rank.expect(error.code() == ErrorCode::kMismatch, error.what());
  }
}

}  // namespace tandem::test
