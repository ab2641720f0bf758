// Wrong arguments: refused before anything is sent, by name, value and limit; the buffer goes on.
#include <gtest/gtest.h>

#include "support/exchange.h"

namespace tandem::test {
namespace {

// Runs `misuse` on every rank, then a pair on the same buffer, which must be as if nothing was.
void expect_refused(const Shape& shape,
                    const std::function<void(Rank&, Buffer&, Exchange&)>& misuse) {
  const Scenario scenario = make_scenario(shape);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    misuse(rank, buffer, exchange);
    exchange.run(buffer);
  });
}

// The same, between a dispatch and its combine.
void expect_combine_refused(const Shape& shape,
                            const std::function<void(Rank&, Buffer&, Exchange&)>& misuse) {
  const Scenario scenario = make_scenario(shape);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    exchange.finish_dispatch();
    misuse(rank, buffer, exchange);
    exchange.check_received();
    exchange.provide_outputs(buffer);
    exchange.combine(buffer);
    exchange.finish_combine();
    exchange.check_combined();
  });
}

constexpr ErrorCode kRefused = ErrorCode::kInvalidArgument;

// Report: one token too many wrote past the buffer.
TEST(Arguments, TokensBeyondTheMaximumAreRefusedWithBothNumbers) {
  expect_refused({.max_tokens = 64}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array x(backend_under_test(), DType::kBFloat16, {65, 64});
    const Array indices(backend_under_test(), DType::kInt64, {65, 2});
    rank.expect_error(kRefused, {"65", "64"},
                      [&] { buffer.dispatch(x, indices, exchange.dispatch_options()); });
  });
}

TEST(Arguments, MaximumOfTheCallLimitsTokensToo) {
  expect_refused({.max_tokens = 64}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    DispatchOptions options = exchange.dispatch_options();
    options.max_tokens = 63;
    rank.expect_error(kRefused, {"64", "63"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
    options.max_tokens = 65;
    rank.expect_error(kRefused, {"65", "64"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
  });
}

TEST(Arguments, SizesBeyondTheBufferAreRefused) {
  expect_refused({.hidden = 64, .topk = 2}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array wide(backend_under_test(), DType::kBFloat16, {8, 65});
    rank.expect_error(kRefused, {"65", "64"}, [&] {
      buffer.dispatch(wide, exchange.topk_idx(), exchange.dispatch_options());
    });
    const Array many(backend_under_test(), DType::kInt64, {8, 3});
    rank.expect_error(kRefused, {"3", "2"},
                      [&] { buffer.dispatch(exchange.x(), many, exchange.dispatch_options()); });
  });
}

// Report: combine took tensors of another length than had been dispatched, and read past them.
TEST(Arguments, CombineRefusesWeightsOfAnotherLength) {
  expect_combine_refused({.topk = 2, .tokens = {8, 5}}, [](Rank& rank, Buffer& buffer,
                                                           Exchange& exchange) {
    const std::int64_t tokens = exchange.out().shape[0];
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{tokens - 1, 2},
                                        {tokens + 1, 2},
                                        {tokens, 1},
                                        {tokens, 3}}) {
      const Array weights(backend_under_test(), DType::kFloat32, {rows, columns});
      rank.expect_error(kRefused, {"weights", std::to_string(rows), std::to_string(tokens)}, [&] {
        buffer.combine(exchange.staged_y(), weights, exchange.result().handle, exchange.out(),
                       exchange.combine_options());
      });
    }
  });
}

TEST(Arguments, CombineRefusesOutputsOfAnotherShape) {
  expect_combine_refused({.hidden = 64}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const std::int64_t tokens = exchange.out().shape[0];
    for (const auto& [rows, columns] :
         {std::pair<std::int64_t, std::int64_t>{tokens - 1, 64}, {tokens, 63}}) {
      const Array out(backend_under_test(), DType::kBFloat16, {rows, columns});
      rank.expect_error(kRefused, {"out"}, [&] {
        buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle, out,
                       exchange.combine_options());
      });
    }
    const Array other(backend_under_test(), DType::kFloat16, {tokens, 64});
    rank.expect_error(kRefused, {"out", "fp16", "bf16"}, [&] {
      buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle, other,
                     exchange.combine_options());
    });
  });
}

TEST(Arguments, CombineRefusesExpertOutputsOfAnotherShape) {
  expect_combine_refused({.num_experts = 4}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array fewer(backend_under_test(), DType::kBFloat16, {2, 15, 64});
    rank.expect_error(kRefused, {"y", "15", "16"}, [&] {
      buffer.combine(fewer, exchange.topk_weights(), exchange.result().handle, exchange.out(),
                     exchange.combine_options());
    });
  });
}

TEST(Arguments, CombineRefusesAnEmptyHandleAndThatOfAnotherBuffer) {
  const Scenario scenario = make_scenario({});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Buffer other(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    rank.expect_error(kRefused, {"handle"}, [&] {
      buffer.combine(exchange.staged_y(), exchange.topk_weights(), DispatchHandle(), exchange.out(),
                     exchange.combine_options());
    });
    rank.expect_error(kRefused, {"handle"}, [&] {
      other.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                    exchange.out(), exchange.combine_options());
    });
    rank.expect_error(kRefused, {"handle"}, [&] {
      static_cast<void>(other.next_combine_buffer(exchange.result().handle, DType::kBFloat16));
    });
    rank.fence();
  });
}

// Report: indices of other types were reinterpreted.
TEST(Arguments, IndicesOfOtherTypesAreRefused) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    for (const DType dtype :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3}) {
      const Array indices(backend_under_test(), dtype, {8, 2});
      rank.expect_error(kRefused, {"topk_idx", std::string(name(dtype))}, [&] {
        buffer.dispatch(exchange.x(), indices, exchange.dispatch_options());
      });
    }
  });
}

TEST(Arguments, TokensOfOtherTypesThanTheFormatAsksForAreRefused) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    for (const DType dtype :
         {DType::kFloat16, DType::kFloat32, DType::kInt32, DType::kInt64, DType::kFloat8E4M3}) {
      const Array x(backend_under_test(), dtype, {8, 64});
      rank.expect_error(kRefused, {"x", std::string(name(dtype))}, [&] {
        buffer.dispatch(x, exchange.topk_idx(), exchange.dispatch_options());
      });
    }
    DispatchOptions options = exchange.dispatch_options();
    options.format = Format::kFp8;
    const Array x(backend_under_test(), DType::kInt32, {8, 64});
    rank.expect_error(kRefused, {"x"}, [&] { buffer.dispatch(x, exchange.topk_idx(), options); });
  });
}

TEST(Arguments, WeightsAndOutputsOfOtherTypesAreRefused) {
  expect_combine_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array weights(backend_under_test(), DType::kBFloat16, {8, 2});
    rank.expect_error(kRefused, {"weights", "bf16"}, [&] {
      buffer.combine(exchange.staged_y(), weights, exchange.result().handle, exchange.out(),
                     exchange.combine_options());
    });
    const Array integers(backend_under_test(), DType::kInt32, {4, 16, 64});
    rank.expect_error(kRefused, {"int32"}, [&] {
      buffer.combine(integers, exchange.topk_weights(), exchange.result().handle, exchange.out(),
                     exchange.combine_options());
    });
  });
}

TEST(Arguments, TypesWiderThanTheBufferAreRefused) {
  expect_combine_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    rank.expect_error(kRefused, {"fp32"}, [&] {
      static_cast<void>(buffer.next_combine_buffer(exchange.result().handle, DType::kFloat32));
    });
    const Array x(backend_under_test(), DType::kFloat32, {8, 64});
    DispatchOptions options = exchange.dispatch_options();
    options.format = Format::kFloat32;
    rank.expect_error(kRefused, {"fp32", "bf16"},
                      [&] { buffer.dispatch(x, exchange.topk_idx(), options); });
  });
}

// Report: an index beyond the experts wrote out of bounds. It is named, with its token.
TEST(Arguments, ExpertBeyondTheLastIsRefusedByName) {
  for (const std::int64_t index : {8LL, 1000LL, (1LL << 31) + 1, (1LL << 32) + 3, 1LL << 62}) {
    const DType dtype = index < (1LL << 31) ? DType::kInt32 : DType::kInt64;
    const Shape shape{.num_experts = 8, .index_dtype = dtype, .routing = Routing::kFull};
    const Scenario scenario = make_scenario(shape);
    reference::Problem wrong_problem = make_problem(shape);
    for (reference::RankInput& input : wrong_problem.ranks) input.topk_idx[2 * 5 + 1] = index;
    Scenario wrong = scenario;
    wrong.problem = wrong_problem;
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      Exchange refused(rank, wrong, buffer);
      Exchange exchange(rank, scenario, buffer);
      rank.expect_error(kRefused, {"topk_idx", "5", std::to_string(index), "8"}, [&] {
        refused.dispatch(buffer);
        rank.settle(buffer);
      });
      // On CPUs the host sees indices, before anything is sent.
      if (backend_under_test() == Backend::kCpu) exchange.run(buffer);
    });
  }
}

TEST(Arguments, TensorsWithoutMemoryAreRefused) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    rank.expect_error(kRefused, {"x"}, [&] {
      buffer.dispatch(ConstTensorView(nullptr, DType::kBFloat16, {8, 64}), exchange.topk_idx(),
                      exchange.dispatch_options());
    });
    rank.expect_error(kRefused, {"x"}, [&] {
      buffer.dispatch({}, exchange.topk_idx(), exchange.dispatch_options());
    });
    rank.expect_error(kRefused, {"topk_idx"},
                      [&] { buffer.dispatch(exchange.x(), {}, exchange.dispatch_options()); });
  });
}

TEST(Arguments, TokensAndIndicesMustAgreeInNumber) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array indices(backend_under_test(), DType::kInt64, {7, 2});
    rank.expect_error(kRefused, {"topk_idx", "7", "8"},
                      [&] { buffer.dispatch(exchange.x(), indices, exchange.dispatch_options()); });
  });
}

TEST(Arguments, ChannelsMayNotBeStrided) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array wide(backend_under_test(), DType::kBFloat16, {8, 128});
    ConstTensorView every_other = wide;
    every_other.shape[1] = 64;
    every_other.strides[1] = 2;
    rank.expect_error(kRefused, {"x", "2"}, [&] {
      buffer.dispatch(every_other, exchange.topk_idx(), exchange.dispatch_options());
    });
  });
}

TEST(Arguments, RowsMayNotOverlapNorLieBetweenElements) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    ConstTensorView overlapping = exchange.x();
    overlapping.strides[0] = 63;
    rank.expect_error(kRefused, {"x", "63", "64"}, [&] {
      buffer.dispatch(overlapping, exchange.topk_idx(), exchange.dispatch_options());
    });
    const Array longer(backend_under_test(), DType::kBFloat16, {9, 64});
    const ConstTensorView between(longer.view().as<std::byte>() + 1, DType::kBFloat16, {8, 64});
    rank.expect_error(kRefused, {"x", "aligned"}, [&] {
      buffer.dispatch(between, exchange.topk_idx(), exchange.dispatch_options());
    });
  });
}

TEST(Arguments, IndicesAndWeightsMayNotHaveGaps) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array wide(backend_under_test(), DType::kInt64, {8, 3});
    ConstTensorView indices = wide;
    indices.shape[1] = 2;
    rank.expect_error(kRefused, {"topk_idx", "3", "row-major"},
                      [&] { buffer.dispatch(exchange.x(), indices, exchange.dispatch_options()); });
  });
  expect_combine_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array wide(backend_under_test(), DType::kFloat32, {8, 3});
    ConstTensorView weights = wide;
    weights.shape[1] = 2;
    rank.expect_error(kRefused, {"topk_weights", "3", "row-major"}, [&] {
      buffer.combine(exchange.staged_y(), weights, exchange.result().handle, exchange.out(),
                     exchange.combine_options());
    });
  });
}

// One distance between rows is all that a padded y may have: experts may not be further apart.
TEST(Arguments, ExpertsOfAPaddedOutputMayNotHaveGapsBetweenThem) {
  expect_combine_refused({.num_experts = 4}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array taller(backend_under_test(), DType::kBFloat16, {2, 17, 64});
    ConstTensorView y = taller;
    y.shape[1] = 16;
    rank.expect_error(kRefused, {"y", "1088", "evenly spaced"}, [&] {
      buffer.combine(y, exchange.topk_weights(), exchange.result().handle, exchange.out(),
                     exchange.combine_options());
    });
  });
}

// A packed send waits for its peers, which a hook's send must not.
TEST(Arguments, PackedPlacementWithAHookIsRefused) {
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    DispatchOptions options = exchange.dispatch_options();
    options.return_hook = true;
    rank.expect_error(kRefused, {"packed", "hook"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
  });
}

TEST(Arguments, TensorToReceiveIntoGoesWithSlottedPlacementOnly) {
  expect_refused(
      {.placement = Placement::kSlotted}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
        DispatchOptions options = exchange.dispatch_options();
        options.recv_x = {};
        rank.expect_error(kRefused, {"recv_x"},
                          [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
        const Array small(backend_under_test(), DType::kBFloat16, {4, 15, 64});
        options.recv_x = small;
        rank.expect_error(kRefused, {"recv_x", "15", "16"},
                          [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
        const Array wrong_type(backend_under_test(), DType::kFloat16, {4, 16, 64});
        options.recv_x = wrong_type;
        rank.expect_error(kRefused, {"recv_x", "fp16"},
                          [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
        options = exchange.dispatch_options();
        const Array scales(backend_under_test(), DType::kFloat32, {4, 16, 1});
        options.recv_scales = scales;
        rank.expect_error(kRefused, {"recv_scales", "bf16"},
                          [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
      });
  expect_refused({}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    const Array given(backend_under_test(), DType::kBFloat16, {4, 16, 64});
    DispatchOptions options = exchange.dispatch_options();
    options.recv_x = given;
    rank.expect_error(kRefused, {"recv_x"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
  });
}

TEST(Arguments, WhatTheBufferWasNotMadeForIsRefused) {
  const Shape shape{.layout = Layout::kPacked};
  expect_refused(shape, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
    DispatchOptions options = exchange.dispatch_options();
    options.layout = Layout::kPadded;
    rank.expect_error(kRefused, {"padded"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
    options = exchange.dispatch_options();
    options.placement = Placement::kSlotted;
    rank.expect_error(kRefused, {"slotted"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
    options = exchange.dispatch_options();
    options.row_alignment = 0;
    rank.expect_error(kRefused, {"row_alignment", "0"},
                      [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
  });
  expect_refused(
      {.placement = Placement::kSlotted}, [](Rank& rank, Buffer& buffer, Exchange& exchange) {
        DispatchOptions options = exchange.dispatch_options();
        options.placement = Placement::kPacked;
        options.recv_x = {};
        rank.expect_error(kRefused, {"packed_placement = false"},
                          [&] { buffer.dispatch(exchange.x(), exchange.topk_idx(), options); });
      });
}

TEST(Arguments, BufferWithoutCombineRefusesIt) {
  const Scenario scenario = make_scenario({});
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.combine = false;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    exchange.check_received();
    rank.expect_error(kRefused, {"combine"}, [&] {
      static_cast<void>(buffer.next_combine_buffer(exchange.result().handle, DType::kBFloat16));
    });
    rank.expect_error(kRefused, {"combine"}, [&] {
      buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                     exchange.out(), exchange.combine_options());
    });
  });
}

// Options of the buffer, each with its value in the message.
TEST(Arguments, BufferOptionsOutOfRangeAreRefused) {
  const BufferOptions sound = options_for(Shape{});
  const auto changed = [&](auto change) {
    BufferOptions options = sound;
    change(options);
    return options;
  };
  const std::vector<std::pair<BufferOptions, std::vector<std::string>>> cases = {
      {changed([](BufferOptions& o) { o.num_experts = 0; }), {"num_experts", "0"}},
      {changed([](BufferOptions& o) { o.max_tokens = 0; }), {"max_tokens", "0"}},
      {changed([](BufferOptions& o) { o.max_hidden = kMaxHidden + 1; }), {"max_hidden", "65537"}},
      {changed([](BufferOptions& o) { o.max_topk = 65; }), {"max_topk", "65", "64"}},
      {changed([](BufferOptions& o) { o.capacity_rows = -1; }), {"capacity_rows", "-1"}},
      {changed([](BufferOptions& o) { o.num_threads = 0; }), {"num_threads", "0"}},
      {changed([](BufferOptions& o) { o.timeout = std::chrono::nanoseconds(0); }), {"timeout"}},
      {changed([](BufferOptions& o) {
         o.expert_owners = {0, 1, 0};
       }),
       {"expert_owners", "3", "8"}},
      {changed([](BufferOptions& o) { o.expert_owners.assign(8, 2); }), {"2"}},
      {changed([](BufferOptions& o) { o.packed_placement = o.slotted_placement = false; }),
       {"placement"}},
  };
  run_ranks(2, [&](Rank& rank) {
    for (const auto& [options, fragments] : cases) {
      rank.expect_error(kRefused, fragments, [&] { Buffer(rank.communicator(), options); });
      rank.expect_error(kRefused, fragments,
                        [&] { static_cast<void>(Buffer::size_bytes(options, 2)); });
    }
    const Buffer works(rank.communicator(), sound);
  });
}

// An option that only one rank gets wrong is an error on all, at once and by name.
TEST(Arguments, OptionThatOneRankGetsWrongFailsAllRanks) {
  run_ranks(3, [&](Rank& rank) {
    BufferOptions options = options_for(Shape{.num_ranks = 3});
    if (rank.index() == 1) options.max_topk = 99;
    rank.expect_error(kRefused, {"max_topk", "99"}, [&] { Buffer(rank.communicator(), options); });
  });
}

}  // namespace
}  // namespace tandem::test
