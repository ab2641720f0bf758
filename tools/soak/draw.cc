#include "soak/draw.h"

#include <algorithm>
#include <array>

#include "common/hash.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

namespace {

constexpr int kNumCases = 24;
constexpr int kMaxTokens = 24;
constexpr int kMaxSoakHidden = 1200;
constexpr int kMaxSoakTopk = 8;
constexpr int kMaxInRecording = 3;

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(mix(seed)) {}
  int below(int end) {
    return static_cast<int>(mix(state_ += 0x9e3779b97f4a7c15U) % static_cast<std::uint64_t>(end));
  }
  bool once_in(int times) { return below(times) == 0; }

 private:
  std::uint64_t state_;
};

}  // namespace

std::size_t SessionPlan::at(std::int64_t pair) const {
  return mix(seed + static_cast<std::uint64_t>(pair)) % cases.size();
}

bool SessionPlan::replays(std::int64_t pair) const {
  return cases[at(pair)].in_recording > 0 &&
         mix(seed + static_cast<std::uint64_t>(pair)) / cases.size() % 2 == 0;
}

SessionPlan draw_session(const SoakOptions& options, std::uint64_t seed,
                         std::chrono::nanoseconds duration) {
  Draws draws(seed);
  Shape shape{.ranks = options.ranks,
              .experts = options.ranks + draws.below(3 * options.ranks),
              .uneven = draws.once_in(2),
              .map_seed = seed};
  SessionPlan plan{
      .options = options, .seed = seed, .duration = duration, .cases = {}, .buffer = {}};
  constexpr std::array kFormats = {Format::kBFloat16, Format::kFloat16, Format::kFloat32,
                                   Format::kFp8,      Format::kFp8Pow2, Format::kFp8Ue8m0};
  for (int i = 0; i < kNumCases; ++i) {
    const bool slotted = draws.once_in(2);
    const Combination combination{
        .format = kFormats[static_cast<std::size_t>(draws.below(kFormats.size()))],
        .placement = slotted ? Placement::kSlotted : Placement::kPacked,
        .layout = draws.once_in(2) ? Layout::kPadded : Layout::kPacked,
        .zero_copy = draws.once_in(2),
        .hook = slotted && draws.once_in(2)};
    shape.tokens = draws.once_in(8) ? 0 : 1 + draws.below(kMaxTokens);
    shape.hidden =
        draws.once_in(4) ? 1 + draws.below(40) : 8 * (1 + draws.below(kMaxSoakHidden / 8));
    shape.topk = 1 + draws.below(kMaxSoakTopk);
    shape.masked = draws.below(10);
    shape.partial_sums = options.backend == Backend::kCpu && draws.once_in(3);
    SoakCase one{.combination = combination, .inputs = {}};
    // What comes out of a recording is known beforehand only where all take part.
    if (!options.faults && draws.once_in(2)) one.in_recording = 1 + draws.below(kMaxInRecording);
    one.inputs.problem =
        make_problem(shape, seed + static_cast<std::uint64_t>(i), combination.format);
    one.inputs.problem.layout = combination.layout;
    plan.cases.push_back(std::move(one));
  }
  plan.buffer.backend = options.backend;
  plan.buffer.num_experts = shape.experts;
  plan.buffer.max_tokens = kMaxTokens;
  plan.buffer.max_hidden = kMaxSoakHidden;
  plan.buffer.max_topk = kMaxSoakTopk;
  plan.buffer.widest_format = Format::kFloat32;
  plan.buffer.expert_owners = expert_owners(shape);
  plan.buffer.timeout = options.timeout;
  plan.buffer.on_timeout = options.faults ? OnTimeout::kMask : OnTimeout::kFail;
  // The wrap of epochs falls into some sessions.
  if (draws.once_in(2)) plan.buffer.first_epoch = 0U - static_cast<std::uint32_t>(draws.below(500));
  return plan;
}

}  // namespace tandem::tools
