#include "runtime/sequence.h"

#include <gtest/gtest.h>

#include <memory>

#include "tandem/error.h"

namespace tandem::runtime {
namespace {

// Asks and records, as Buffer does.
DispatchId dispatch(Sequence& sequence, bool hook = false) {
  const DispatchId dispatch{sequence.next_id(), sequence.choose_half(hook)};
  sequence.record_dispatch(dispatch.half, hook);
  return dispatch;
}

void combine(Sequence& sequence, DispatchId dispatch, bool hook = false) {
  sequence.require_combine(dispatch, hook);
  sequence.record_combine(dispatch.half, hook);
}

template <typename Call>
ErrorCode code_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kUnsupported;  // stands for "no error"
}

TEST(Sequence, DispatchesThatAreNotCombinedTakeTheHalvesInTurn) {
  Sequence sequence;
  EXPECT_EQ(dispatch(sequence).half, 0);
  EXPECT_EQ(dispatch(sequence).half, 1);
  EXPECT_EQ(dispatch(sequence).half, 0);
}

TEST(Sequence, ADispatchTakesItsPredecessorsHalfOnceThatIsCombined) {
  Sequence sequence;
  combine(sequence, dispatch(sequence));
  const DispatchId second = dispatch(sequence);
  EXPECT_EQ(second.half, 0);
  const DispatchId third = dispatch(sequence);
  EXPECT_EQ(third.half, 1);
  combine(sequence, second);  // not the last dispatch
  EXPECT_EQ(dispatch(sequence).half, 0);
}

TEST(Sequence, AHandleLivesUntilTheNextDispatchButOne) {
  Sequence sequence;
  const DispatchId first = dispatch(sequence);
  dispatch(sequence);
  sequence.require_received(first);
  dispatch(sequence);
  EXPECT_EQ(code_of([&] { sequence.require_received(first); }), ErrorCode::kStaleHandle);
  EXPECT_EQ(code_of([&] { sequence.require_received({}); }), ErrorCode::kStaleHandle);
}

TEST(Sequence, CombinesDoNotAgeHandles) {
  Sequence sequence;
  const DispatchId first = dispatch(sequence);
  const DispatchId second = dispatch(sequence);
  combine(sequence, second);
  combine(sequence, first);
  combine(sequence, first);
}

TEST(Sequence, AReservedHalfIsSkippedUntilItsCombine) {
  Sequence sequence;
  const auto owner = std::make_shared<int>();
  const DispatchId first = dispatch(sequence);
  sequence.reserve(first.half, owner);
  EXPECT_EQ(dispatch(sequence).half, 1);
  EXPECT_EQ(dispatch(sequence).half, 1);
  sequence.require_received(first);
  combine(sequence, first);
  EXPECT_EQ(dispatch(sequence).half, 0);
}

TEST(Sequence, AReservationEndsWithItsHandle) {
  Sequence sequence;
  auto owner = std::make_shared<int>();
  sequence.reserve(dispatch(sequence).half, owner);
  EXPECT_TRUE(sequence.is_reserved(0));
  owner.reset();
  EXPECT_FALSE(sequence.is_reserved(0));
}

TEST(Sequence, BothHalvesReservedRefuseADispatch) {
  Sequence sequence;
  const auto owner = std::make_shared<int>();
  sequence.reserve(dispatch(sequence).half, owner);
  sequence.reserve(dispatch(sequence).half, owner);
  EXPECT_EQ(code_of([&] { (void)sequence.choose_half(false); }), ErrorCode::kOrder);
}

TEST(Sequence, AThirdOperationWhileTwoHooksAreHeldBackIsRefused) {
  Sequence sequence;
  dispatch(sequence, true);
  dispatch(sequence, true);
  EXPECT_EQ(code_of([&] { (void)sequence.choose_half(true); }), ErrorCode::kOrder);
}

TEST(Sequence, AnOperationWithoutAHookWaitsForNoHeldHook) {
  Sequence sequence;
  dispatch(sequence, true);
  EXPECT_EQ(code_of([&] { (void)sequence.choose_half(false); }), ErrorCode::kOrder);
  sequence.record_received();
  EXPECT_EQ(sequence.choose_half(false), 1);
}

TEST(Sequence, ACombineBeforeItsDispatchsHookIsRefused) {
  Sequence sequence;
  const DispatchId first = dispatch(sequence, true);
  EXPECT_EQ(code_of([&] { combine(sequence, first, true); }), ErrorCode::kOrder);
  sequence.record_received();
  combine(sequence, first, true);
}

TEST(Sequence, AHalfWhoseCombinesHookIsHeldIsNotTaken) {
  Sequence sequence;
  const DispatchId first = dispatch(sequence);
  dispatch(sequence);
  combine(sequence, first, true);  // half 0 would be next
  EXPECT_EQ(sequence.choose_half(true), 1);
}

TEST(Sequence, HooksRunInOrder) {
  Sequence sequence;
  const std::uint64_t first = sequence.record_dispatch(0, true);
  const std::uint64_t second = sequence.record_dispatch(1, true);
  EXPECT_EQ(code_of([&] { sequence.require_oldest(second); }), ErrorCode::kOrder);
  sequence.require_oldest(first);
  sequence.record_received();
  sequence.require_oldest(second);
}

TEST(Sequence, ARefusedOperationLeavesNoTrace) {
  Sequence sequence;
  (void)sequence.choose_half(false);
  (void)sequence.choose_half(true);
  EXPECT_EQ(dispatch(sequence).half, 0);
}

}  // namespace
}  // namespace tandem::runtime
