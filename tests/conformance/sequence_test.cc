// Operations in sequence on one buffer: shapes and formats that change from call to call, hooks
// held back, halves in use at once, handles and views that outlive each other, epochs that wrap.
#include <gtest/gtest.h>

#include "support/exchange.h"

namespace tandem::test {
namespace {

Shape hooked(std::uint64_t seed) {
  return {.placement = Placement::kSlotted, .hook = true, .seed = seed};
}

Shape packed(std::uint64_t seed) { return {.seed = seed}; }

// Report: buffers had to be "cleaned" between shapes or formats, and a stray clean-up of a slow
// rank wiped the signal of a fast one. Here nobody cleans anything.
TEST(Sequence, ShapeAndFormatMayChangeFromCallToCall) {
  std::vector<Shape> shapes;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Shape shape{.num_ranks = 3, .num_experts = 7};
    shape.hidden = 1 + static_cast<int>(seed * 37 % 300);
    shape.topk = 1 + static_cast<int>(seed % 6);
    shape.max_tokens = 1 << (seed % 4);
    shape.format = static_cast<Format>(seed % 6);
    shape.placement = seed % 3 == 0 ? Placement::kSlotted : Placement::kPacked;
    shape.layout = seed % 2 == 0 ? Layout::kPadded : Layout::kPacked;
    shape.combine_dtype = static_cast<DType>(seed % 3);
    shape.zero_copy = seed % 4 < 2;
    shape.seed = seed;
    shapes.push_back(shape);
  }
  run_in_turn(shapes);
}

// Report: dispatches without combines, or combines repeated, broke the alternation of halves.
TEST(Sequence, DispatchesNeedNotBeCombined) {
  const std::vector<Scenario> scenarios = make_scenarios({packed(1), packed(2), packed(3)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    for (int repetition = 0; repetition < 5; ++repetition) {
      for (const Scenario& scenario : scenarios) {
        Exchange exchange(rank, scenario, buffer);
        exchange.dispatch(buffer);
        exchange.check_received();
      }
    }
  });
}

TEST(Sequence, HandleMayBeCombinedMoreThanOnce) {
  for (const bool zero_copy : {false, true}) {
    Shape shape = packed(1);
    shape.zero_copy = zero_copy;
    const Scenario scenario = make_scenario(shape);
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      Exchange exchange(rank, scenario, buffer);
      exchange.dispatch(buffer);
      for (int repetition = 0; repetition < 4; ++repetition) {
        exchange.provide_outputs(buffer);
        exchange.combine(buffer);
        exchange.check_combined();
      }
    });
  }
}

// Report: the send of one operation while the hook of the one before was held back hung.
TEST(Sequence, NextSendMayGoOutWhileTheHookBeforeIsHeldBack) {
  const std::vector<Scenario> scenarios = make_scenarios({hooked(1), hooked(2)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    Exchange first(rank, scenarios[0], buffer);
    Exchange second(rank, scenarios[1], buffer);
    for (int repetition = 0; repetition < 4; ++repetition) {
      first.dispatch(buffer);
      second.dispatch(buffer);
      first.finish_dispatch();
      first.check_received();
      second.finish_dispatch();
      second.check_received();
      first.provide_outputs(buffer);
      second.provide_outputs(buffer);
      first.combine(buffer);
      second.combine(buffer);
      first.finish_combine();
      first.check_combined();
      second.finish_combine();
      second.check_combined();
    }
  });
}

// Two micro-batches whose sends and receives overlap all the way, as schedulers do it.
TEST(Sequence, TwoMicroBatchesOverlapForLong) {
  std::vector<Shape> shapes;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    Shape shape = hooked(seed);
    shape.num_ranks = 3;
    shape.zero_copy = seed % 2 == 0;
    shape.tokens = {static_cast<int>(seed % 9), 8, static_cast<int>(seed * 5 % 9)};
    shapes.push_back(shape);
  }
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  run_ranks(3, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shapes));
    std::vector<std::unique_ptr<Exchange>> batches;
    for (const Scenario& scenario : scenarios) {
      batches.push_back(std::make_unique<Exchange>(rank, scenario, buffer));
    }
    batches[0]->dispatch(buffer);
    batches[0]->finish_dispatch();
    for (std::size_t batch = 0; batch < batches.size(); ++batch) {
      Exchange& current = *batches[batch];
      Exchange* next = batch + 1 < batches.size() ? batches[batch + 1].get() : nullptr;
      if (next != nullptr) next->dispatch(buffer);
      current.check_received();
      current.provide_outputs(buffer);
      current.combine(buffer);
      if (next != nullptr) next->finish_dispatch();
      current.finish_combine();
      current.check_combined();
    }
  });
}

// Report: dispatch, dispatch, combine, combine mixed the two up. In either order of combines.
TEST(Sequence, TwoDispatchesThenTheirCombinesWithDistinctData) {
  for (const bool zero_copy : {false, true}) {
    for (const bool reversed : {false, true}) {
      Shape shape_a = packed(1);
      shape_a.zero_copy = zero_copy;
      Shape shape_b = shape_a;
      shape_b.seed = 2;
      const std::vector<Scenario> scenarios = make_scenarios({shape_a, shape_b});
      run_ranks(2, [&](Rank& rank) {
        Buffer buffer(rank.communicator(), options_for(shape_a));
        Exchange a(rank, scenarios[0], buffer);
        Exchange b(rank, scenarios[1], buffer);
        for (int repetition = 0; repetition < 3; ++repetition) {
          a.dispatch(buffer);
          b.dispatch(buffer);
          a.check_received();
          b.check_received();
          a.provide_outputs(buffer);
          b.provide_outputs(buffer);
          (reversed ? b : a).combine(buffer);
          (reversed ? a : b).combine(buffer);
          a.check_combined();
          b.check_combined();
        }
      });
    }
  }
}

// A third operation would wait for itself: refused at once, and all goes on.
TEST(Sequence, ThirdOperationWhileTwoHooksAreHeldBackIsRefused) {
  const std::vector<Scenario> scenarios = make_scenarios({hooked(1), hooked(2), hooked(3)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    Exchange first(rank, scenarios[0], buffer);
    Exchange second(rank, scenarios[1], buffer);
    Exchange third(rank, scenarios[2], buffer);
    first.dispatch(buffer);
    second.dispatch(buffer);
    rank.expect_error(ErrorCode::kOrder, {"hook"}, [&] {
      buffer.dispatch(third.x(), third.topk_idx(), third.dispatch_options());
    });
    rank.expect_error(ErrorCode::kOrder, {"hook"}, [&] {
      buffer.combine(first.staged_y(), first.topk_weights(), first.result().handle, first.out(),
                     first.combine_options());
    });
    first.finish_dispatch();
    second.finish_dispatch();
    first.check_received();
    second.check_received();
    third.run(buffer);
  });
}

TEST(Sequence, CombineBeforeItsDispatchWasReceivedIsRefused) {
  const Scenario scenario = make_scenario(hooked(1));
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    rank.expect_error(ErrorCode::kOrder, {"hook"}, [&] {
      buffer.combine(exchange.staged_y(), exchange.topk_weights(), exchange.result().handle,
                     exchange.out(), exchange.combine_options());
    });
    exchange.finish_dispatch();
    exchange.check_received();
    exchange.provide_outputs(buffer);
    exchange.combine(buffer);
    exchange.finish_combine();
    exchange.check_combined();
  });
}

TEST(Sequence, HooksOutOfOrderAreRefused) {
  const std::vector<Scenario> scenarios = make_scenarios({hooked(1), hooked(2)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    Exchange first(rank, scenarios[0], buffer);
    Exchange second(rank, scenarios[1], buffer);
    first.dispatch(buffer);
    second.dispatch(buffer);
    rank.expect_error(ErrorCode::kOrder, {"order"}, [&] { second.result().hook(); });
    first.finish_dispatch();
    second.finish_dispatch();
    first.check_received();
    second.check_received();
  });
}

TEST(Sequence, HookRunsOnceHoweverOftenItAndItsCopiesAreCalled) {
  const Scenario scenario = make_scenario(hooked(1));
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.dispatch(buffer);
    const Hook copy = exchange.result().hook;
    exchange.finish_dispatch();
    copy();
    exchange.result().hook();
    exchange.check_received();
    Exchange next(rank, scenario, buffer);
    next.run(buffer);
    copy();
  });
}

TEST(Sequence, EmptyHookDoesNothing) {
  const Hook hook;
  EXPECT_FALSE(hook);
  hook();
}

// The view moves for nobody, and what is written there is what peers read.
TEST(Sequence, CombineBufferStaysWhereItIsUntilItsCombine) {
  Shape shape = packed(1);
  shape.zero_copy = true;
  const std::vector<Scenario> scenarios = make_scenarios({shape, packed(2)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for({shape, packed(2)}));
    Exchange exchange(rank, scenarios[0], buffer);
    Exchange between(rank, scenarios[1], buffer);
    exchange.dispatch(buffer);
    exchange.provide_outputs(buffer);
    const auto view = [&] {
      rank.fence();
      const TensorView now = buffer.next_combine_buffer(exchange.result().handle, DType::kBFloat16);
      rank.fence();
      return now;
    };
    const TensorView before = view();
    rank.expect(view().data == before.data, "the view moved between two calls");
    // Operations in between take the other half, again and again.
    for (int repetition = 0; repetition < 3; ++repetition) between.run(buffer);
    const TensorView after = view();
    rank.expect(after.data == before.data && after.strides == before.strides,
                "the view moved over an operation");
    exchange.check_received();  // its rows are intact, too
    exchange.combine(buffer);
    exchange.check_combined();
  });
}

TEST(Sequence, CombineBufferHasTheShapeOfTheDispatch) {
  for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
    Shape shape = packed(1);
    shape.layout = layout;
    shape.format = Format::kFp8;
    shape.hidden = 100;
    shape.combine_dtype = DType::kFloat32;
    const Scenario scenario = make_scenario(shape);
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      Exchange exchange(rank, scenario, buffer);
      exchange.dispatch(buffer);
      rank.fence();
      const TensorView wide = buffer.next_combine_buffer(exchange.result().handle, DType::kFloat32);
      const TensorView narrow =
          buffer.next_combine_buffer(exchange.result().handle, DType::kFloat16);
      rank.fence();
      const TensorView& x = exchange.result().x;
      for (const TensorView& view : {wide, narrow}) {
        rank.expect(view.num_dims == x.num_dims && view.shape == x.shape, "shape differs from x");
        rank.expect(reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0, "rows not aligned");
        const std::int64_t pitch = view.strides[view.num_dims - 2] * size_of(view.dtype);
        rank.expect(pitch % 16 == 0, "pitch not a multiple of 16 bytes");
      }
      rank.expect(wide.dtype == DType::kFloat32 && narrow.dtype == DType::kFloat16, "dtype");
    });
  }
}

// Two halves reserved: a dispatch has nowhere to go.
TEST(Sequence, DispatchWhileBothHalvesAreReservedIsRefused) {
  Shape shape = packed(1);
  shape.zero_copy = true;
  Shape other = shape;
  other.seed = 2;
  const std::vector<Scenario> scenarios = make_scenarios({shape, other});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange a(rank, scenarios[0], buffer);
    Exchange b(rank, scenarios[1], buffer);
    Exchange c(rank, scenarios[0], buffer);
    a.dispatch(buffer);
    b.dispatch(buffer);
    a.provide_outputs(buffer);
    b.provide_outputs(buffer);
    rank.expect_error(ErrorCode::kOrder, {"next_combine_buffer"},
                      [&] { buffer.dispatch(c.x(), c.topk_idx(), c.dispatch_options()); });
    a.combine(buffer);
    b.combine(buffer);
    a.check_combined();
    b.check_combined();
    c.run(buffer);
  });
}

// A handle whose half was taken by a later dispatch is refused, and nothing is disturbed by it.
TEST(Sequence, StaleHandleIsRefused) {
  const std::vector<Scenario> scenarios = make_scenarios({packed(1), packed(2), packed(3)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    Exchange a(rank, scenarios[0], buffer);
    Exchange b(rank, scenarios[1], buffer);
    Exchange c(rank, scenarios[2], buffer);
    a.dispatch(buffer);
    b.dispatch(buffer);
    c.dispatch(buffer);
    rank.expect_error(ErrorCode::kStaleHandle, {"handle"}, [&] {
      buffer.combine(a.staged_y(), a.topk_weights(), a.result().handle, a.out(),
                     a.combine_options());
    });
    rank.expect_error(ErrorCode::kStaleHandle, {"handle"}, [&] {
      static_cast<void>(buffer.next_combine_buffer(a.result().handle, DType::kBFloat16));
    });
    for (Exchange* exchange : {&b, &c}) {
      exchange->provide_outputs(buffer);
      exchange->combine(buffer);
      exchange->check_combined();
    }
  });
}

// A view lives until its half is used again: over the next dispatch, and over all combines.
TEST(Sequence, ViewLivesUntilItsHalfIsTaken) {
  const std::vector<Scenario> scenarios = make_scenarios({packed(1), packed(2)});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenarios[0].shape));
    Exchange a(rank, scenarios[0], buffer);
    Exchange b(rank, scenarios[1], buffer);
    a.dispatch(buffer);
    b.dispatch(buffer);
    b.provide_outputs(buffer);
    b.combine(buffer);
    b.combine(buffer);
    a.check_received();
    a.provide_outputs(buffer);
    a.combine(buffer);
    a.check_combined();
    a.check_received();
  });
}

// Zero-copy is recognised by the view; a view of another handle, or one not asked for, is refused.
TEST(Sequence, OnlyTheHandlesOwnViewIsCombinedWithoutCopy) {
  Shape shape = packed(1);
  shape.zero_copy = true;
  Shape other = shape;
  other.seed = 2;
  const std::vector<Scenario> scenarios = make_scenarios({shape, other});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange a(rank, scenarios[0], buffer);
    Exchange b(rank, scenarios[1], buffer);
    a.dispatch(buffer);
    b.dispatch(buffer);
    a.provide_outputs(buffer);
    rank.fence();
    const TensorView of_a = buffer.next_combine_buffer(a.result().handle, DType::kBFloat16);
    rank.fence();
    rank.expect_error(ErrorCode::kInvalidArgument, {"y"}, [&] {
      buffer.combine(of_a, b.topk_weights(), b.result().handle, b.out(), b.combine_options());
    });
    a.combine(buffer);
    a.check_combined();
  });
}

// The 32-bit epochs of the control words wrap: tested by starting near the end.
TEST(Sequence, EpochsMayWrap) {
  for (const std::uint32_t before : {1U, 2U, 3U, 6U, 9U}) {
    std::vector<Shape> shapes;
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      Shape shape{.num_ranks = 3, .zero_copy = seed % 3 == 0, .seed = seed};
      shape.placement = seed % 2 == 0 ? Placement::kSlotted : Placement::kPacked;
      shape.hook = seed % 2 == 0;
      shapes.push_back(shape);
    }
    const std::vector<Scenario> scenarios = make_scenarios(shapes);
    run_ranks(3, [&](Rank& rank) {
      BufferOptions options = options_for(shapes);
      options.first_epoch = 0U - before;
      Buffer buffer(rank.communicator(), options);
      for (const Scenario& scenario : scenarios) {
        Exchange exchange(rank, scenario, buffer);
        exchange.run(buffer);
      }
    });
  }
}

// Every first epoch is a first epoch, zero and one before the wrap of the sign too.
TEST(Sequence, FirstEpochMayBeAny) {
  const std::vector<Scenario> scenarios = make_scenarios({packed(1), hooked(2)});
  for (const std::uint32_t first : {0U, 2U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    run_ranks(2, [&](Rank& rank) {
      BufferOptions options = options_for({packed(1), hooked(2)});
      options.first_epoch = first;
      Buffer buffer(rank.communicator(), options);
      for (const Scenario& scenario : scenarios) {
        Exchange exchange(rank, scenario, buffer);
        exchange.run(buffer);
      }
    });
  }
}

}  // namespace
}  // namespace tandem::test
