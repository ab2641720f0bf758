// One rank's share of an expert-parallel layer: tokens [first, first + T), and the experts that the
// buffer's map gives it. Times dispatch, experts and combine apart, and judges its tokens.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/launch.h"
#include "run_layer/layer.h"
#include "run_layer/options.h"

namespace tandem::tools {

struct RankLayerReport {
  std::vector<double> dispatch_us, experts_us, combine_us;  // one entry per iteration
  std::vector<std::int64_t> experts;                        // ids of the local experts
  std::vector<std::int64_t> tokens_per_expert;              // rows received by each
  std::int64_t num_tokens = 0;                              // its own
  double timeout_s = 0;                                     // of the buffer
  double max_abs_error = 0;                                 // against the file's y
  double sum_abs_error = 0;
  double max_relative_error = 0;  // the same by the token's largest |y|
  bool bitwise_equal = false;     // to the run in a single process
  std::uint64_t hash = 0;  // of its tokens; the sum over ranks does not depend on their number
  std::vector<std::string> errors;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankLayerReport, dispatch_us, experts_us, combine_us, experts,
                                   tokens_per_expert, num_tokens, timeout_s, max_abs_error,
                                   sum_abs_error, max_relative_error, bitwise_equal, hash, errors)

struct LayerPlan {
  const LayerOptions& options;
  const LayerWeights& weights;
  const LayerInput& input;
  const std::vector<float>& alone;  // [T, H], of run_alone
};

// First token of a rank: as even as possible, the first T % R ranks having one more.
int first_token(int num_tokens, int num_ranks, int rank);

// Reports one RankLayerReport. Throws where a peer is lost.
void run_rank(const LayerPlan& plan, const Communicator& communicator,
              const ReportFunction& report);

}  // namespace tandem::tools
