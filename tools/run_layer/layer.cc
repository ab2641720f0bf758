#include "run_layer/layer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tandem/types.h"

namespace tandem::tools {

namespace {

constexpr std::int64_t kMaxTokens = 1 << 30;
constexpr std::int64_t kMaxExperts = 1 << 20;

// -1 in `shape`: any extent. Throws unless the tensor is as described.
SafetensorsTensor require(const Safetensors& file, const std::string& name,
                          const std::string& dtype, const std::vector<std::int64_t>& shape) {
  const SafetensorsTensor& tensor = file.at(name);
  if (tensor.dtype != dtype) {
    throw SafetensorsError(fmt::format("{} is {}, not {}", name, tensor.dtype, dtype));
  }
  const bool fits =
      std::equal(tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(),
                 [](std::int64_t is, std::int64_t wanted) { return wanted < 0 || is == wanted; });
  if (!fits) {
    throw SafetensorsError(fmt::format("{} has shape [{}], expected [{}] (-1: any)", name,
                                       fmt::join(tensor.shape, ", "), fmt::join(shape, ", ")));
  }
  return tensor;
}

int extent(const SafetensorsTensor& tensor, std::size_t dimension, const char* what,
           std::int64_t least, std::int64_t most) {
  const std::int64_t value = tensor.shape[dimension];
  if (value < least || value > most) {
    throw SafetensorsError(fmt::format("{} is {}, not in [{}, {}]", what, value, least, most));
  }
  return static_cast<int>(value);
}

void check_selections(const LayerInput& input, const LayerWeights& weights) {
  for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
    if (input.topk_idx[i] >= weights.num_experts) {
      throw SafetensorsError(fmt::format("{}: token {} selects expert {} of {}", input.routing,
                                         i / static_cast<std::size_t>(input.topk),
                                         input.topk_idx[i], weights.num_experts));
    }
  }
}

template <typename T>
std::vector<std::int64_t> widened(const SafetensorsTensor& tensor) {
  const std::vector<T> narrow = elements_of<T>(tensor);
  return {narrow.begin(), narrow.end()};
}

}  // namespace

LayerWeights load_weights(const Safetensors& file) {
  LayerWeights weights;
  const SafetensorsTensor w1 = require(file, "w1", "BF16", {-1, -1, -1});
  weights.num_experts = extent(w1, 0, "w1's number of experts", 1, kMaxExperts);
  weights.hidden = extent(w1, 1, "w1's hidden size", 1, kMaxHidden);
  weights.ffn = extent(w1, 2, "w1's inner size", 1, 1 << 20);
  const SafetensorsTensor w2 =
      require(file, "w2", "BF16", {weights.num_experts, weights.ffn, weights.hidden});
  weights.w1 = elements_of<bfloat16>(w1);
  weights.w2 = elements_of<bfloat16>(w2);
  return weights;
}

LayerInput load_input(const Safetensors& file, const LayerWeights& weights) {
  LayerInput input{.routing = "topk_idx"};
  const SafetensorsTensor x = require(file, "x", "BF16", {-1, weights.hidden});
  input.num_tokens = extent(x, 0, "x's number of tokens", 0, kMaxTokens);
  const SafetensorsTensor topk_idx = require(file, "topk_idx", "I64", {input.num_tokens, -1});
  input.topk = extent(topk_idx, 1, "topk_idx's top-k", 1, kMaxTopk);
  input.x = elements_of<bfloat16>(x);
  input.topk_idx = elements_of<std::int64_t>(topk_idx);
  input.topk_weights =
      elements_of<float>(require(file, "topk_weights", "F32", {input.num_tokens, input.topk}));
  input.y = elements_of<float>(require(file, "y", "F32", {input.num_tokens, weights.hidden}));
  check_selections(input, weights);
  return input;
}

LayerInput load_routing(const Safetensors& file, const LayerWeights& weights,
                        const std::string& name) {
  LayerInput input{.routing = name};
  const SafetensorsTensor& selections = file.at(name);
  require(file, name, selections.dtype, {-1, -1});
  input.num_tokens = extent(selections, 0, "a routing's number of tokens", 0, kMaxTokens);
  input.topk = extent(selections, 1, "a routing's top-k", 1, kMaxTopk);
  if (selections.dtype == "I16") {
    input.topk_idx = widened<std::int16_t>(selections);
  } else if (selections.dtype == "I32") {
    input.topk_idx = widened<std::int32_t>(selections);
  } else if (selections.dtype == "I64") {
    input.topk_idx = elements_of<std::int64_t>(selections);
  } else {
    throw SafetensorsError(fmt::format("{} is {}, not I16, I32 or I64", name, selections.dtype));
  }
  check_selections(input, weights);

  const std::vector<bfloat16> x =
      elements_of<bfloat16>(require(file, "x", "BF16", {-1, weights.hidden}));
  if (x.empty() && input.num_tokens > 0) throw SafetensorsError("x has no tokens to repeat");
  const auto total =
      static_cast<std::size_t>(input.num_tokens) * static_cast<std::size_t>(weights.hidden);
  input.x.reserve(total);
  while (input.x.size() < total) {
    const std::size_t count = std::min(x.size(), total - input.x.size());
    input.x.insert(input.x.end(), x.begin(), x.begin() + static_cast<std::ptrdiff_t>(count));
  }
  input.topk_weights.assign(input.topk_idx.size(), 1.0F / static_cast<float>(input.topk));
  return input;
}

std::vector<std::string> routing_names(const Safetensors& file) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : file.tensors()) {
    if (name.starts_with("routing.")) names.push_back(name);
  }
  return names;
}

}  // namespace tandem::tools
