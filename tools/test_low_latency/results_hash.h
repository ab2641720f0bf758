// One number for all that a rank receives and gets back, in an order that does not depend on the
// layout: equal numbers for equal results, whatever the combination's placement and layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/hash.h"
#include "test_low_latency/expectation.h"

namespace tandem::tools {

// Feed it counts, ranges, then for each expert its rows, then the combined tokens.
class ResultsHash {
 public:
  void add_counts(std::span<const std::int32_t> counts) { hasher_.add(std::as_bytes(counts)); }
  void add_ranges(std::span<const std::int64_t> ranges) { hasher_.add(std::as_bytes(ranges)); }
  void add_row(std::int32_t source_token, std::span<const std::byte> values,
               std::span<const std::byte> scales) {
    hasher_.add_value(source_token);
    hasher_.add(values);
    hasher_.add(scales);
  }
  void add_combined(std::span<const std::byte> combined) { hasher_.add(combined); }
  [[nodiscard]] std::uint64_t value() const { return hasher_.value(); }

 private:
  Hasher hasher_;
};

// The number of a rank whose results are the oracle's.
std::uint64_t expected_hash(const Expectation& expectation, const Arrivals& arrivals, int rank);

}  // namespace tandem::tools
