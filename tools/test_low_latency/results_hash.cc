#include "test_low_latency/results_hash.h"

#include "test_low_latency/experts.h"

namespace tandem::tools {

std::uint64_t expected_hash(const Expectation& expectation, const Arrivals& arrivals, int rank) {
  const auto index = static_cast<std::size_t>(rank);
  const reference::RankOutput& arrival = arrivals[index];
  const Format format = expectation.problem.format;
  const int hidden = expectation.problem.hidden;
  const auto value_bytes =
      static_cast<std::size_t>(hidden) * static_cast<std::size_t>(size_of(value_dtype(format)));
  const auto scale_bytes = static_cast<std::size_t>(num_scales(format, hidden)) * 4;

  ResultsHash hash;
  hash.add_counts(arrival.counts);
  hash.add_ranges(arrival.ranges);
  for (std::size_t local = 0; local < arrival.counts.size(); ++local) {
    const auto first = static_cast<std::size_t>(arrival.offsets[local]);
    for (std::size_t row = first; row < first + static_cast<std::size_t>(arrival.counts[local]);
         ++row) {
      const EncodedTokens& source =
          expectation.encoded[static_cast<std::size_t>(arrival.source_ranks[row])];
      const auto token = static_cast<std::size_t>(arrival.source_tokens[row]);
      hash.add_row(arrival.source_tokens[row],
                   std::span(source.values).subspan(token * value_bytes, value_bytes),
                   std::span(source.scales).subspan(token * scale_bytes, scale_bytes));
    }
  }
  hash.add_combined(expectation.combined[index]);
  return hash.value();
}

}  // namespace tandem::tools
