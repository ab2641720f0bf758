// From the reports of all ranks about one routing to its result: checks, figures, JSON, text.
#pragma once

#include <string>
#include <vector>

#include "common/launch.h"
#include "common/report.h"
#include "run_layer/rank_layer.h"

namespace tandem::tools {

// How far a result may be from the file's y: half a unit in the last place of a bf16 number (2^-9)
// of the token's largest |y|. Ours is float32 throughout and comes far closer.
inline constexpr double kMaxRelativeError = 0x1p-9;

// Adds checks, failures and one result to `report`.
void add_layer_outcomes(const LayerPlan& plan, const std::vector<RankOutcome>& outcomes,
                        Report& report);

// The result for people.
std::string text_of(const nlohmann::json& result);

}  // namespace tandem::tools
