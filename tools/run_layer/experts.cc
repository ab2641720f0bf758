#include "run_layer/experts.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace tandem::tools {

namespace {

// Four floats: the compiler makes one instruction of each operation, on every target.
using Lanes = float __attribute__((vector_size(16)));
constexpr std::size_t kLanes = 4;

// A block of the result that stays in registers while the inner index runs.
constexpr std::size_t kRows = 4;
constexpr std::size_t kColumns = 2 * kLanes;

std::size_t size(int value) { return static_cast<std::size_t>(value); }

std::vector<float> widened(std::span<const bfloat16> values) {
  std::vector<float> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(),
                 [](bfloat16 value) { return to_float(value); });
  return result;
}

struct Matrices {
  const float* a;  // [rows, m]
  const float* b;  // [m, n]
  float* c;        // [rows, n]
  std::size_t m;
  std::size_t n;
};

// c[first_row + 0..kNumRows, column + 0..kColumns] of c = a b.
template <std::size_t kNumRows>
void multiply_block(const Matrices& matrices, std::size_t first_row, std::size_t column) {
  const auto [a, b, c, m, n] = matrices;
  Lanes sums[kNumRows][2] = {};
  for (std::size_t i = 0; i < m; ++i) {
    Lanes weights[2];
    std::memcpy(weights, b + i * n + column, sizeof(weights));
    for (std::size_t row = 0; row < kNumRows; ++row) {
      const float factor = a[(first_row + row) * m + i];
      sums[row][0] += factor * weights[0];
      sums[row][1] += factor * weights[1];
    }
  }
  for (std::size_t row = 0; row < kNumRows; ++row) {
    std::memcpy(c + (first_row + row) * n + column, sums[row], sizeof(sums[row]));
  }
}

// The columns that fill no block.
void multiply_rest(const Matrices& matrices, std::size_t row, std::size_t first_column) {
  const auto [a, b, c, m, n] = matrices;
  for (std::size_t column = first_column; column < n; ++column) {
    float sum = 0;
    for (std::size_t i = 0; i < m; ++i) sum += a[row * m + i] * b[i * n + column];
    c[row * n + column] = sum;
  }
}

// c = a b. Columns run side by side, which leaves the order of each sum alone.
void multiply(const Matrices& matrices, std::size_t rows) {
  const std::size_t blocks_end = matrices.n / kColumns * kColumns;
  std::size_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    for (std::size_t column = 0; column < blocks_end; column += kColumns) {
      multiply_block<kRows>(matrices, row, column);
    }
  }
  for (; row < rows; ++row) {
    for (std::size_t column = 0; column < blocks_end; column += kColumns) {
      multiply_block<1>(matrices, row, column);
    }
  }
  for (row = 0; row < rows; ++row) multiply_rest(matrices, row, blocks_end);
}

// 0.5 v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))), the approximation of Hendrycks and Gimpel
// (2016); in float64, so that its own error does not show.
float gelu_tanh(float value) {
  const double v = value;
  constexpr double kSqrtTwoOverPi = 0.7978845608028654;
  return static_cast<float>(0.5 * v *
                            (1.0 + std::tanh(kSqrtTwoOverPi * (v + 0.044715 * v * v * v))));
}

}  // namespace

Expert::Expert(const LayerWeights& weights, int id)
    : hidden_(size(weights.hidden)), ffn_(size(weights.ffn)) {
  const std::size_t elements = hidden_ * ffn_;
  w1_ = widened(std::span(weights.w1).subspan(size(id) * elements, elements));
  w2_ = widened(std::span(weights.w2).subspan(size(id) * elements, elements));
}

void Expert::run(std::span<const bfloat16> x, std::span<float> y) const {
  const std::size_t rows = x.size() / hidden_;
  const std::vector<float> wide = widened(x);
  std::vector<float> inner(rows * ffn_);
  multiply({wide.data(), w1_.data(), inner.data(), hidden_, ffn_}, rows);
  std::transform(inner.begin(), inner.end(), inner.begin(), gelu_tanh);
  multiply({inner.data(), w2_.data(), y.data(), ffn_, hidden_}, rows);
}

std::vector<float> run_alone(const LayerWeights& weights, const LayerInput& input) {
  const std::size_t hidden = size(weights.hidden);
  // Which selections each expert serves, in order.
  std::vector<std::vector<std::size_t>> served(size(weights.num_experts));
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    if (input.topk_idx[i] >= 0) served[static_cast<std::size_t>(input.topk_idx[i])].push_back(i);
  }
  std::vector<float> outputs(input.topk_idx.size() * hidden);  // [T, K, H]
  for (int id = 0; id < weights.num_experts; ++id) {
    const std::vector<std::size_t>& selections = served[size(id)];
    if (selections.empty()) continue;
    std::vector<bfloat16> x;
    for (const std::size_t selection : selections) {
      const auto token =
          input.x.begin() + static_cast<std::ptrdiff_t>(selection / size(input.topk) * hidden);
      x.insert(x.end(), token, token + static_cast<std::ptrdiff_t>(hidden));
    }
    std::vector<float> y(x.size());
    Expert(weights, id).run(x, y);
    for (std::size_t row = 0; row < selections.size(); ++row) {
      std::copy_n(y.data() + row * hidden, hidden, outputs.data() + selections[row] * hidden);
    }
  }
  std::vector<float> result(size(input.num_tokens) * hidden, 0.0F);
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    if (input.topk_idx[i] < 0) continue;
    float* const sum = result.data() + i / size(input.topk) * hidden;
    const float* const output = outputs.data() + i * hidden;
    for (std::size_t channel = 0; channel < hidden; ++channel) {
      sum[channel] += input.topk_weights[i] * output[channel];
    }
  }
  return result;
}

}  // namespace tandem::tools
