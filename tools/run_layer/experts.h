// The trained experts: y = gelu_tanh(x w1) w2 in float32, from bf16 weights. Each value is the sum
// of its products in the order of the inner index, every product and sum rounded, whatever rows are
// computed together: so a row's result does not depend on which rank computes it, or beside what.
#pragma once

#include <span>
#include <vector>

#include "run_layer/layer.h"

namespace tandem::tools {

class Expert {
 public:
  // Widens the weights of expert `id` to float32 once.
  Expert(const LayerWeights& weights, int id);

  // y [rows, H] from x [rows, H].
  void run(std::span<const bfloat16> x, std::span<float> y) const;

 private:
  std::size_t hidden_;
  std::size_t ffn_;
  std::vector<float> w1_;  // [H, F]
  std::vector<float> w2_;  // [F, H]
};

// The layer in one process, without dispatch or combine: what every number of ranks must give bit
// for bit. [T, H]; products and sums over k as Buffer::combine defines them.
std::vector<float> run_alone(const LayerWeights& weights, const LayerInput& input);

}  // namespace tandem::tools
