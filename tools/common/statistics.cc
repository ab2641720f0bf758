#include "common/statistics.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>

namespace tandem::tools {

Quantiles quantiles(std::vector<double> samples) {
  assert(!samples.empty());
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double quantile) {
    const double rank = std::ceil(quantile * static_cast<double>(samples.size()));
    return samples[std::max<std::size_t>(static_cast<std::size_t>(rank), 1) - 1];
  };
  return {.median = at(0.5), .p99 = at(0.99)};
}

}  // namespace tandem::tools
