#include "test_low_latency/check.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "tandem/numeric.h"
#include "test_low_latency/experts.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

namespace {

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// "element 12 is 0x3f80, expected 0x3f00 (3 of 7168 differ)"
std::string difference(std::span<const std::byte> seen, std::span<const std::byte> expected,
                       std::size_t element_bytes) {
  const auto bits = [&](std::span<const std::byte> bytes, std::size_t element) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + element * element_bytes, element_bytes);
    return value;
  };
  const std::size_t count = expected.size() / element_bytes;
  std::size_t first = count;
  std::size_t different = 0;
  for (std::size_t element = count; element-- > 0;) {
    if (bits(seen, element) == bits(expected, element)) continue;
    first = element;
    ++different;
  }
  if (different == 0) return "no element differs";
  return fmt::format("element {} is {:#x}, expected {:#x} ({} of {} differ)", first,
                     bits(seen, first), bits(expected, first), different, count);
}

double element_at(std::span<const std::byte> bytes, DType dtype, std::size_t element) {
  const auto read = [&](auto value) {
    std::memcpy(&value, bytes.data() + element * sizeof(value), sizeof(value));
    return static_cast<double>(to_float(value));
  };
  switch (dtype) {
    case DType::kFloat16:
      return read(float16{});
    case DType::kFloat32:
      return read(float{});
    default:
      return read(bfloat16{});
  }
}

}  // namespace

std::vector<std::string> Tally::messages() const {
  std::vector<std::string> all = messages_;
  for (const auto& [kind, failed] : failed_) {
    if (failed > kMaxToldPerKind) {
      all.push_back(fmt::format("{}: {} more failures", kind, failed - kMaxToldPerKind));
    }
  }
  return all;
}

RoundCheck::RoundCheck(const Expectation& expectation, const Arrivals& arrivals, int rank,
                       Tally& tally)
    : expectation_(expectation), arrival_(arrivals[size(rank)]), rank_(size(rank)), tally_(tally) {}

void RoundCheck::metadata(std::span<const std::int32_t> counts,
                          std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> ranges) {
  const auto compare = [&](const char* kind, auto seen, const auto& expected) {
    if (!tally_.check(seen.size() == expected.size(), kind, [&] {
          return fmt::format("{} entries, expected {}", seen.size(), expected.size());
        })) {
      return;
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      tally_.check(seen[i] == expected[i], kind, [&] {
        return fmt::format("entry {} is {}, expected {}", i, seen[i], expected[i]);
      });
    }
  };
  compare("counts", counts, arrival_.counts);
  compare("offsets", offsets, arrival_.offsets);
  compare("ranges", ranges, arrival_.ranges);
  hash_.add_counts(counts);
  hash_.add_ranges(ranges);
}

void RoundCheck::rows(int local_expert, std::span<const std::int32_t> source_tokens,
                      std::span<const std::byte> values, std::span<const std::byte> scales) {
  const Format format = expectation_.problem.format;
  const int hidden = expectation_.problem.hidden;
  const std::size_t element_bytes = size(size_of(value_dtype(format)));
  const std::size_t value_bytes = size(hidden) * element_bytes;
  const std::size_t scale_bytes = size(num_scales(format, hidden)) * 4;
  const std::size_t first = size(arrival_.offsets[size(local_expert)]);
  const std::size_t count = size(arrival_.counts[size(local_expert)]);
  for (std::size_t row = 0; row < count; ++row) {
    const std::int32_t token = arrival_.source_tokens[first + row];
    const std::int32_t source = arrival_.source_ranks[first + row];
    const EncodedTokens& encoded = expectation_.encoded[size(source)];
    const auto row_values = values.subspan(row * value_bytes, value_bytes);
    const auto row_scales = scales.subspan(row * scale_bytes, scale_bytes);
    const auto due_values =
        std::span(encoded.values).subspan(size(token) * value_bytes, value_bytes);
    const auto due_scales =
        std::span(encoded.scales).subspan(size(token) * scale_bytes, scale_bytes);
    const auto where = [&] {
      return fmt::format("row {} of expert {} (token {} of rank {})", row,
                         arrival_.experts[size(local_expert)], token, source);
    };
    tally_.check(source_tokens[row] == token, "source tokens",
                 [&] { return fmt::format("{}: names token {}", where(), source_tokens[row]); });
    tally_.check(equal(row_values, due_values), "values", [&] {
      return fmt::format("{}: {}", where(), difference(row_values, due_values, element_bytes));
    });
    if (scale_bytes > 0) {
      tally_.check(equal(row_scales, due_scales), "scales", [&] {
        return fmt::format("{}: {}", where(), difference(row_scales, due_scales, 4));
      });
    }
    hash_.add_row(source_tokens[row], row_values, row_scales);
  }
}

void RoundCheck::combined(std::span<const std::byte> out) {
  const std::vector<std::byte>& expected = expectation_.combined[rank_];
  hash_.add_combined(out);
  if (!tally_.check(out.size() == expected.size(), "combined", [&] {
        return fmt::format("{} bytes, expected {}", out.size(), expected.size());
      })) {
    return;
  }
  const DType dtype = token_dtype(expectation_.problem.format);
  const std::size_t element_bytes = size(size_of(dtype));
  const std::size_t token_bytes = size(expectation_.problem.hidden) * element_bytes;
  for (std::size_t token = 0; token * token_bytes < out.size(); ++token) {
    const auto seen = out.subspan(token * token_bytes, token_bytes);
    const auto due = std::span(expected).subspan(token * token_bytes, token_bytes);
    if (tally_.check(equal(seen, due), "combined", [&] {
          return fmt::format("token {}: {}", token, difference(seen, due, element_bytes));
        })) {
      continue;
    }
    for (std::size_t i = 0; i < token_bytes / element_bytes; ++i) {
      const double error = std::abs(element_at(seen, dtype, i) - element_at(due, dtype, i));
      // A NaN is the largest error there is.
      if (!(error <= max_abs_error_)) max_abs_error_ = std::isnan(error) ? HUGE_VAL : error;
    }
  }
}

}  // namespace tandem::tools
