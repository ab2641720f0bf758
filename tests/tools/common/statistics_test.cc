#include "common/statistics.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace tandem::tools {
namespace {

TEST(Statistics, OneSampleIsMedianAndP99) {
  const Quantiles figures = quantiles({3.0});
  EXPECT_EQ(figures.median, 3.0);
  EXPECT_EQ(figures.p99, 3.0);
}

TEST(Statistics, QuantilesAreMeasuredValuesByNearestRank) {
  std::vector<double> samples(100);
  std::iota(samples.rbegin(), samples.rend(), 1.0);  // 100 down to 1
  const Quantiles figures = quantiles(samples);
  EXPECT_EQ(figures.median, 50.0);
  EXPECT_EQ(figures.p99, 99.0);
}

TEST(Statistics, OneOutlierOfFiftyIsTheP99) {
  std::vector<double> samples(50, 1.0);
  samples[7] = 900.0;
  EXPECT_EQ(quantiles(samples).p99, 900.0);
  EXPECT_EQ(quantiles(samples).median, 1.0);
}

}  // namespace
}  // namespace tandem::tools
