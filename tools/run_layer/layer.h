// A mixture-of-experts layer from a file: what its tokens are, where they go, what its experts
// weigh and what must come out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run_layer/safetensors.h"
#include "tandem/numeric.h"

namespace tandem::tools {

// y = sum over k of topk_weights * (gelu_tanh(x w1[e]) w2[e]), e = topk_idx.
struct LayerWeights {
  int num_experts = 0;       // E
  int hidden = 0;            // H
  int ffn = 0;               // F
  std::vector<bfloat16> w1;  // [E, H, F]
  std::vector<bfloat16> w2;  // [E, F, H]
};

// Tokens with a routing.
struct LayerInput {
  std::string routing = {};                 // name of the tensor of selections
  int num_tokens = 0;                       // T
  int topk = 0;                             // K
  std::vector<bfloat16> x = {};             // [T, H]
  std::vector<std::int64_t> topk_idx = {};  // [T, K], negative: none
  std::vector<float> topk_weights = {};     // [T, K]
  std::vector<float> y = {};                // [T, H] as the file has it; empty where it has none
};

// Tensors x, topk_idx, topk_weights, w1, w2 and y. All throw SafetensorsError where one is missing
// or its dtype or shape does not fit, naming both.
LayerWeights load_weights(const Safetensors& file);
LayerInput load_input(const Safetensors& file, const LayerWeights& weights);

// The selections of another tensor ([N, K] of int16, int32 or int64): N tokens that repeat the
// file's x from its start, all weights 1 / K, no y.
LayerInput load_routing(const Safetensors& file, const LayerWeights& weights,
                        const std::string& name);

// Names of the file's other tensors of selections ("routing.0", ...).
std::vector<std::string> routing_names(const Safetensors& file);

}  // namespace tandem::tools
