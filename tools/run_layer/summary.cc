#include "run_layer/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "common/statistics.h"

namespace tandem::tools {

namespace {

using nlohmann::json;

json spread(const std::vector<std::int64_t>& values) {
  if (values.empty()) return {{"min", 0}, {"mean", 0}, {"max", 0}};
  double sum = 0;
  for (const std::int64_t value : values) sum += static_cast<double>(value);
  return {{"min", *std::min_element(values.begin(), values.end())},
          {"mean", sum / static_cast<double>(values.size())},
          {"max", *std::max_element(values.begin(), values.end())}};
}

json slowest(const std::vector<RankLayerReport>& reports,
             std::vector<double> RankLayerReport::*times) {
  Quantiles slowest;
  for (const RankLayerReport& report : reports) {
    if ((report.*times).empty()) return nullptr;
    const Quantiles figures = quantiles(report.*times);
    slowest.median = std::max(slowest.median, figures.median);
    slowest.p99 = std::max(slowest.p99, figures.p99);
  }
  return {{"median", slowest.median}, {"p99", slowest.p99}};
}

// JSON has no infinity.
json finite(double value) { return std::isfinite(value) ? json(value) : json("infinite"); }

class Summary {
 public:
  Summary(const LayerPlan& plan, Report& report) : plan_(plan), report_(report) {}

  void add(const std::vector<RankOutcome>& outcomes) {
    collect(outcomes);
    if (reports_.size() == outcomes.size()) check();
    report_.results.push_back(result());
  }

 private:
  void fail(int rank, const std::string& message) {
    report_.failures.push_back({plan_.input.routing, rank, message});
  }

  void expect(bool passed, int rank, const std::string& message) {
    ++report_.checks;
    if (!passed) fail(rank, message);
  }

  void collect(const std::vector<RankOutcome>& outcomes) {
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
      if (!outcomes[rank].error.empty()) fail(static_cast<int>(rank), outcomes[rank].error);
      for (const json& message : outcomes[rank].reports) {
        reports_.push_back(message.get<RankLayerReport>());
        for (const std::string& error : reports_.back().errors) {
          fail(static_cast<int>(rank), error);
        }
      }
    }
    tokens_per_expert_.assign(static_cast<std::size_t>(plan_.weights.num_experts), 0);
    for (const RankLayerReport& rank : reports_) {
      std::int64_t sum = 0;
      for (std::size_t local = 0; local < rank.tokens_per_expert.size(); ++local) {
        tokens_per_expert_.at(static_cast<std::size_t>(rank.experts.at(local))) =
            rank.tokens_per_expert[local];
        sum += rank.tokens_per_expert[local];
      }
      tokens_per_rank_.push_back(sum);
      num_tokens_ += rank.num_tokens;
      max_abs_error_ = std::max(max_abs_error_, rank.max_abs_error);
      sum_abs_error_ += rank.sum_abs_error;
    }
  }

  void check() {
    std::vector<std::int64_t> histogram(tokens_per_expert_.size(), 0);
    for (const std::int64_t expert : plan_.input.topk_idx) {
      if (expert >= 0) ++histogram[static_cast<std::size_t>(expert)];
    }
    for (std::size_t expert = 0; expert < histogram.size(); ++expert) {
      expect(tokens_per_expert_[expert] == histogram[expert], -1,
             fmt::format("expert {} received {} tokens of {}", expert, tokens_per_expert_[expert],
                         histogram[expert]));
    }
    expect(num_tokens_ == plan_.input.num_tokens, -1,
           fmt::format("{} tokens came back of {}", num_tokens_, plan_.input.num_tokens));
    for (std::size_t rank = 0; rank < reports_.size(); ++rank) {
      const RankLayerReport& report = reports_[rank];
      bitwise_equal_ = bitwise_equal_ && report.bitwise_equal;
      expect(report.bitwise_equal, static_cast<int>(rank),
             "the result is not bit for bit that of a single process");
      if (plan_.input.y.empty()) continue;
      expect(report.max_relative_error <= kMaxRelativeError, static_cast<int>(rank),
             fmt::format("an error of {} of the token's largest |y|, more than bf16 rounding ({})",
                         report.max_relative_error, kMaxRelativeError));
    }
  }

  [[nodiscard]] json result() const {
    const LayerOptions& options = plan_.options;
    std::uint64_t hash = 0;
    for (const RankLayerReport& report : reports_) hash += report.hash;
    const double num_values =
        static_cast<double>(std::max<std::int64_t>(num_tokens_, 1)) * plan_.weights.hidden;
    json result = {{"backend", name(options.backend)},
                   {"ranks", options.ranks},
                   {"launch", name(options.launch)},
                   {"tokens", plan_.input.num_tokens},
                   {"hidden", plan_.weights.hidden},
                   {"topk", plan_.input.topk},
                   {"experts", plan_.weights.num_experts},
                   {"format", "bf16"},
                   {"combine_dtype", "fp32"},
                   {"placement", name(options.placement)},
                   {"layout", name(options.layout)},
                   {"zero_copy", options.zero_copy},
                   {"hook", false},
                   {"routing", plan_.input.routing},
                   {"iterations", options.iterations},
                   {"timeout_s", reports_.empty() ? 0 : reports_.front().timeout_s},
                   {"dispatch_us", slowest(reports_, &RankLayerReport::dispatch_us)},
                   {"experts_us", slowest(reports_, &RankLayerReport::experts_us)},
                   {"combine_us", slowest(reports_, &RankLayerReport::combine_us)},
                   {"bitwise_equal", bitwise_equal_ && !reports_.empty()},
                   {"hash", fmt::format("{:016x}", hash)},
                   {"tokens_per_expert", spread(tokens_per_expert_)},
                   {"tokens_per_rank", spread(tokens_per_rank_)}};
    const bool has_y = !plan_.input.y.empty();
    result["max_abs_error"] = has_y ? finite(max_abs_error_) : json(nullptr);
    result["mean_abs_error"] = has_y ? finite(sum_abs_error_ / num_values) : json(nullptr);
    return result;
  }

  const LayerPlan& plan_;
  Report& report_;
  std::vector<RankLayerReport> reports_;
  std::vector<std::int64_t> tokens_per_expert_;
  std::vector<std::int64_t> tokens_per_rank_;
  std::int64_t num_tokens_ = 0;
  double max_abs_error_ = 0;
  double sum_abs_error_ = 0;
  bool bitwise_equal_ = true;
};

}  // namespace

void add_layer_outcomes(const LayerPlan& plan, const std::vector<RankOutcome>& outcomes,
                        Report& report) {
  Summary(plan, report).add(outcomes);
}

std::string text_of(const json& result) {
  const auto text = [](const json& value) {
    return value.is_number() ? fmt::format("{:.3g}", value.get<double>()) : value.dump();
  };
  const auto spread_text = [&](const char* what) {
    const json& values = result[what];
    return fmt::format("busiest {}, mean {:.1f}, quietest {}", values["max"].dump(),
                       values["mean"].get<double>(), values["min"].dump());
  };
  std::string lines =
      fmt::format("{}: {} tokens, top-{} of {} experts, {} ranks as {} ({})\n",
                  result["routing"].get<std::string>(), result["tokens"].dump(),
                  result["topk"].dump(), result["experts"].dump(), result["ranks"].dump(),
                  result["launch"].get<std::string>(), result["backend"].get<std::string>());
  if (!result["max_abs_error"].is_null()) {
    lines += fmt::format("  error against y:    largest {}, mean {}\n",
                         text(result["max_abs_error"]), text(result["mean_abs_error"]));
  }
  lines += fmt::format("  single process:     {}\n",
                       result["bitwise_equal"].get<bool>() ? "the same, bit for bit" : "DIFFERENT");
  lines += fmt::format("  tokens per expert:  {}\n", spread_text("tokens_per_expert"));
  lines += fmt::format("  tokens per rank:    {}\n", spread_text("tokens_per_rank"));
  const auto median = [&](const char* part) {
    return result[part].is_null() ? std::string("-")
                                  : fmt::format("{:.0f}", result[part]["median"].get<double>());
  };
  lines += fmt::format("  us, slowest rank:   dispatch {}, experts {}, combine {}\n",
                       median("dispatch_us"), median("experts_us"), median("combine_us"));
  return lines;
}

}  // namespace tandem::tools
