#include "run_layer/layer.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "tools/run_layer/layer_file.h"

namespace tandem::tools {
namespace {

// 2 experts, hidden 3, inner 2, 4 tokens, top-2.
struct Parts {
  std::vector<std::int64_t> x_shape = {4, 3};
  std::vector<std::int64_t> w1_shape = {2, 3, 2};
  std::vector<std::int64_t> w2_shape = {2, 2, 3};
  std::vector<std::int64_t> y_shape = {4, 3};
  std::string x_dtype = "BF16";
  std::vector<std::int64_t> topk_idx = {0, 1, 1, 0, -1, 1, 0, -1};
  std::vector<std::int16_t> routing = {1, 0, 1, 0, 1, 0, 1, 0, 1, -1};

  [[nodiscard]] Safetensors file() const {
    LayerFile layer;
    const auto ones = [](const std::vector<std::int64_t>& shape) {
      std::int64_t product = 1;
      for (const std::int64_t extent : shape) product *= extent;
      return std::vector<std::uint16_t>(static_cast<std::size_t>(product), 0x3f80);
    };
    layer.add("x", x_dtype, x_shape, ones(x_shape))
        .add("w1", "BF16", w1_shape, ones(w1_shape))
        .add("w2", "BF16", w2_shape, ones(w2_shape))
        .add("topk_idx", "I64", {4, 2}, topk_idx)
        .add("topk_weights", "F32", {4, 2}, std::vector<float>(8, 0.5F))
        .add("y", "F32", y_shape, std::vector<float>(ones(y_shape).size(), 1.0F))
        .add("routing.0", "I16", {5, 2}, routing)
        .add("routing.1", "F32", {1, 2}, std::vector<float>(2, 0.0F));
    return Safetensors::parse(layer.bytes());
  }
};

std::string refusal(const std::function<void()>& load) {
  try {
    load();
  } catch (const SafetensorsError& error) {
    return error.what();
  }
  return "accepted";
}

std::string input_refusal(const Parts& parts) {
  return refusal([&] {
    const Safetensors file = parts.file();
    load_input(file, load_weights(file));
  });
}

TEST(Layer, LoadsWeightsAndInput) {
  const Safetensors file = Parts{}.file();
  const LayerWeights weights = load_weights(file);
  EXPECT_EQ(weights.num_experts, 2);
  EXPECT_EQ(weights.hidden, 3);
  EXPECT_EQ(weights.ffn, 2);
  const LayerInput input = load_input(file, weights);
  EXPECT_EQ(input.num_tokens, 4);
  EXPECT_EQ(input.topk, 2);
  EXPECT_EQ(input.topk_idx, Parts{}.topk_idx);
  EXPECT_EQ(input.y.size(), 12U);
}

TEST(Layer, AnotherRoutingRepeatsXAndHasNoY) {
  const Safetensors file = Parts{}.file();
  const LayerInput input = load_routing(file, load_weights(file), "routing.0");
  EXPECT_EQ(input.num_tokens, 5);
  EXPECT_EQ(input.x.size(), 15U);
  EXPECT_EQ(input.topk_idx[9], -1);
  EXPECT_EQ(input.topk_weights, std::vector<float>(10, 0.5F));
  EXPECT_TRUE(input.y.empty());
  EXPECT_EQ(routing_names(file), (std::vector<std::string>{"routing.0", "routing.1"}));
}

TEST(Layer, RefusesShapesThatDoNotFitTogether) {
  EXPECT_EQ(input_refusal({.x_shape = {4, 2}}), "x has shape [4, 2], expected [-1, 3] (-1: any)");
  EXPECT_EQ(input_refusal({.w2_shape = {2, 3, 3}}),
            "w2 has shape [2, 3, 3], expected [2, 2, 3] (-1: any)");
  EXPECT_EQ(input_refusal({.x_shape = {5, 3}}),
            "topk_idx has shape [4, 2], expected [5, -1] (-1: any)");
  EXPECT_EQ(input_refusal({.y_shape = {12}}), "y has shape [12], expected [4, 3] (-1: any)");
  EXPECT_EQ(input_refusal({.w1_shape = {0, 3, 2}, .w2_shape = {0, 2, 3}}),
            "w1's number of experts is 0, not in [1, 1048576]");
}

TEST(Layer, RefusesOtherDTypes) {
  EXPECT_EQ(input_refusal({.x_dtype = "F16"}), "x is F16, not BF16");
  const Safetensors file = Parts{}.file();
  EXPECT_EQ(refusal([&] { load_routing(file, load_weights(file), "routing.1"); }),
            "routing.1 is F32, not I16, I32 or I64");
  EXPECT_EQ(refusal([&] { load_routing(file, load_weights(file), "routing.9"); }),
            "the file has no tensor \"routing.9\"");
}

TEST(Layer, RefusesExpertsThatDoNotExist) {
  Parts parts;
  parts.topk_idx[5] = 2;
  EXPECT_EQ(input_refusal(parts), "topk_idx: token 2 selects expert 2 of 2");
}

}  // namespace
}  // namespace tandem::tools
