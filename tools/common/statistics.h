// Order statistics of measured times.
#pragma once

#include <vector>

namespace tandem::tools {

struct Quantiles {
  double median = 0;
  double p99 = 0;
};

// By nearest rank: both are values that were measured. `samples` must not be empty.
Quantiles quantiles(std::vector<double> samples);

}  // namespace tandem::tools
