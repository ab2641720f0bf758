// Judges what one rank received and got back against the oracle, bit for bit. Works on host copies,
// knows no buffer: its own tests hand it damaged data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "test_low_latency/expectation.h"
#include "test_low_latency/results_hash.h"

namespace tandem::tools {

// Findings of one rank. Of each kind of failure the first few are told, the others counted.
class Tally {
 public:
  // Counts a check; `message` makes the text if it failed.
  template <typename Message>
  bool check(bool passed, const std::string& kind, Message message) {
    ++checks_;
    if (!passed && ++failed_[kind] <= kMaxToldPerKind) messages_.push_back(kind + ": " + message());
    return passed;
  }

  [[nodiscard]] std::int64_t checks() const { return checks_; }
  [[nodiscard]] bool passed() const { return failed_.empty(); }
  [[nodiscard]] std::vector<std::string> messages() const;

 private:
  static constexpr int kMaxToldPerKind = 4;
  std::int64_t checks_ = 0;
  std::map<std::string, std::int64_t> failed_;  // by kind
  std::vector<std::string> messages_;
};

// One round of dispatch and combine.
class RoundCheck {
 public:
  // All three must outlive it; `tally` collects what is found.
  RoundCheck(const Expectation& expectation, const Arrivals& arrivals, int rank, Tally& tally);

  // As in DispatchResult.
  void metadata(std::span<const std::int32_t> counts, std::span<const std::int64_t> offsets,
                std::span<const std::int64_t> ranges);

  // The rows of one local expert, from its first on, as many as the oracle says; experts in order.
  void rows(int local_expert, std::span<const std::int32_t> source_tokens,
            std::span<const std::byte> values, std::span<const std::byte> scales);

  // The combined tokens, [T, H].
  void combined(std::span<const std::byte> out);

  [[nodiscard]] std::uint64_t hash() const { return hash_.value(); }
  [[nodiscard]] double max_abs_error() const { return max_abs_error_; }  // of combined tokens

 private:
  const Expectation& expectation_;
  const reference::RankOutput& arrival_;
  std::size_t rank_;
  Tally& tally_;
  ResultsHash hash_;
  double max_abs_error_ = 0;
};

}  // namespace tandem::tools
