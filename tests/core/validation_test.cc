// Validation apart from any buffer: capacities, shapes of results, agreement of options. That each
// wrong argument is refused, by name, is in tests/conformance/arguments_test.cc.
#include "core/validation.h"

#include <gtest/gtest.h>

#include <functional>

#include "tandem/error.h"

namespace tandem::core {
namespace {

using NamedOptions = std::vector<std::pair<std::string, std::string>>;

ErrorInfo error_of(const std::function<void()>& call, const std::string& fragment) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what();
    return error.info();
  }
  ADD_FAILURE() << "nothing was thrown, expected '" << fragment << "'";
  return {};
}

TEST(Validation, ResultOfARankWithoutExpertsKeepsItsOtherDimensions) {
  const ResultRows padded{Layout::kPadded, 0, 24};
  EXPECT_EQ(padded.total(), 0);
  const TensorView view = result_view(nullptr, DType::kBFloat16, 64, 72, padded);
  EXPECT_EQ(view.num_dims, 3);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, kMaxDims>{0, 24, 64}));
}

TEST(Validation, ResultsAreStridedByThePitch) {
  const ResultRows padded{Layout::kPadded, 3, 24};
  EXPECT_EQ(padded.total(), 72);
  const TensorView view = result_view(nullptr, DType::kBFloat16, 64, 72, padded);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, kMaxDims>{3, 24, 64}));
  EXPECT_EQ(view.strides, (std::array<std::int64_t, kMaxDims>{24 * 72, 72, 1}));
  const ResultRows packed{Layout::kPacked, 3, 50};
  EXPECT_EQ(packed.total(), 50);
  const TensorView flat = result_view(nullptr, DType::kFloat32, 64, 68, packed);
  EXPECT_EQ(flat.num_dims, 2);
  EXPECT_EQ(flat.shape, (std::array<std::int64_t, kMaxDims>{50, 64, 0}));
  EXPECT_EQ(flat.strides, (std::array<std::int64_t, kMaxDims>{68, 1, 0}));
}

// Ranks on GPUs do not add up by rank; they say so before anything is sent.
TEST(Validation, WeightsOfADispatchAreForRanksOnCpus) {
  const std::vector<float> weights(4 * 2);
  DispatchOptions options;
  options.topk_weights = view_of(weights.data(), {4, 2});
  BufferOptions buffer{.backend = Backend::kCuda, .num_experts = 6};
  const std::vector<std::int32_t> idx(2);
  const auto validate_on = [&](Backend backend) {
    buffer.backend = backend;
    static_cast<void>(validate_dispatch(view_of(weights.data(), {1, 8}),
                                        view_of(idx.data(), {1, 2}), options, buffer, 2, 3, {}));
  };
  EXPECT_EQ(error_of([&] { validate_on(Backend::kCuda); }, "topk_weights").code,
            ErrorCode::kUnsupported);
  EXPECT_EQ(error_of([&] { validate_on(Backend::kCpu); }, "topk_weights has shape [4, 2]").code,
            ErrorCode::kInvalidArgument);
}

TEST(Validation, CapacityFollowsTheDocumentedFormulas) {
  BufferOptions options{.num_experts = 7, .max_tokens = 10, .max_hidden = 100, .max_topk = 2};
  const ExpertMap experts = make_expert_map(options, 3);
  layout::Capacity capacity = make_capacity(options, experts, 5);
  EXPECT_EQ(capacity.max_local_experts, 3);
  EXPECT_EQ(capacity.num_arrival_words, 5);
  EXPECT_EQ(capacity.rows, 3 * 3 * 10);
  EXPECT_EQ(capacity.view_rows, capacity.rows);
  EXPECT_EQ(capacity.combine_rows, capacity.rows);
  EXPECT_EQ(capacity.landing_rows, 3 * 10 * 2);
  options.padded_layout = options.slotted_placement = options.combine = false;
  capacity = make_capacity(options, experts, 1);
  EXPECT_EQ(capacity.rows, 3 * 10 * 2);
  EXPECT_EQ(capacity.landing_rows, 0);
  EXPECT_EQ(capacity.combine_rows, 0);
}

// Row numbers have 31 bits; what would outgrow them is refused instead of wrapping.
TEST(Validation, RowsBeyondThirtyOneBitsAreRefused) {
  const BufferOptions options{.num_experts = 640, .max_tokens = 1 << 24, .max_topk = 64};
  const ErrorInfo info =
      error_of([&] { make_capacity(options, make_expert_map(options, 8), 1); }, "capacity in rows");
  EXPECT_EQ(info.code, ErrorCode::kInvalidArgument);
}

TEST(Validation, DisagreementNamesOptionRankAndBothValues) {
  const NamedOptions first = {{"max_tokens", "64"}, {"max_topk", "8"}};
  const NamedOptions other = {{"max_tokens", "32"}, {"max_topk", "8"}};
  const std::vector<RankOptions> all = {{0, first}, {1, first}, {2, other}};
  const ErrorInfo info =
      error_of([&] { require_agreement(all); }, "max_tokens is 64 on rank 0 and 32 on rank 2");
  EXPECT_EQ(info.code, ErrorCode::kMismatch);
  EXPECT_EQ(info.peer, 2);
  require_agreement({{0, first}, {1, first}});
}

// What may differ from rank to rank is not compared.
TEST(Validation, OptionsOfOneRankNeedNotAgree) {
  BufferOptions options;
  const NamedOptions before = agreed_options(options);
  options.num_threads = 7;
  options.timeout = std::chrono::seconds(1);
  options.device = 3;
  options.num_sms = 16;
  EXPECT_EQ(agreed_options(options), before);
  options.combine = false;
  EXPECT_NE(agreed_options(options), before);
}

}  // namespace
}  // namespace tandem::core
