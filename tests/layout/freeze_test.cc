// Freezes what ranks agree on byte by byte: numbers of enumerators, bits of control words, offsets
// in a block, bytes of a row. A change here is a change of the wire format: docs/wire_format.md and
// the version must change with it. All is checked by the compiler; the one test says that it
// compiled.
#include <gtest/gtest.h>

#include "layout/block.h"
#include "layout/board.h"
#include "layout/control_word.h"
#include "layout/row.h"
#include "tandem/types.h"

namespace tandem::layout {
namespace {

template <typename Enum>
constexpr int number(Enum value) {
  return static_cast<int>(value);
}

static_assert(number(DType::kBFloat16) == 0 && number(DType::kFloat16) == 1 &&
              number(DType::kFloat32) == 2 && number(DType::kFloat8E4M3) == 3 &&
              number(DType::kInt32) == 4 && number(DType::kInt64) == 5);
static_assert(number(Format::kBFloat16) == 0 && number(Format::kFloat16) == 1 &&
              number(Format::kFloat32) == 2 && number(Format::kFp8) == 3 &&
              number(Format::kFp8Pow2) == 4 && number(Format::kFp8Ue8m0) == 5);
static_assert(number(Placement::kAutomatic) == 0 && number(Placement::kPacked) == 1 &&
              number(Placement::kSlotted) == 2);
static_assert(number(Layout::kPadded) == 0 && number(Layout::kPacked) == 1);
static_assert(number(Backend::kCpu) == 0 && number(Backend::kCuda) == 1);
static_assert(number(Operation::kNone) == 0 && number(Operation::kDispatch) == 1 &&
              number(Operation::kCombine) == 2);
static_assert(number(Phase::kNone) == 0 && number(Phase::kSetup) == 1 &&
              number(Phase::kEnter) == 2 && number(Phase::kHeader) == 3 &&
              number(Phase::kRows) == 4 && number(Phase::kReady) == 5 &&
              number(Phase::kCombineHalf) == 6 && number(Phase::kMembership) == 7);
static_assert(number(OnTimeout::kFail) == 0 && number(OnTimeout::kMask) == 1);
static_assert(kMaxHidden == 65536 && kMaxTopk == 64 && kMaxRanks == 1024 && kFp8GroupSize == 128);

static_assert(sizeof(Word) == 8 && sizeof(Epoch) == 4);
static_assert(make_word(0x12345678, 0x9abcdef0) == 0x123456789abcdef0ULL);
static_assert(encode(Header{Operation::kDispatch, 0, 0x1234567}) == 0x21234567U);
static_assert(encode(Header{Operation::kCombine, 1, 0xfffffff}) == 0x5fffffffU);
static_assert(kRosterMasked == 1 && kRosterPending == 2 && kRosterLost == 4);
static_assert(kHalted == 1U << 24);
// The membership board of three ranks.
static_assert(number(Status::kAcked) == 0 && number(Status::kFinishedEven) == 1 &&
              number(Status::kFinishedOdd) == 2 && number(Status::kAt) == 3 &&
              number(Status::kWriting) == 4 && number(Status::kRecovering) == 5 &&
              number(Status::kKnocks) == 6 && number(Status::kLeft) == 7 &&
              number(Status::kIncarnation) == 8 && number(Status::kProcess) == 9 &&
              number(Status::kStartTime) == 10 && number(Status::kNamespace) == 11 &&
              number(Status::kMet) == 12 && number(Status::kSettled) == 13);
static_assert(kNumViews == 8 && kCauseBytes == 1024);
static_assert(Board(3).decision() == 0 && Board(3).status(0, Status::kAt) == 128 + 24);
static_assert(Board(3).view_words() == 2 + 1 + 1 + 2 + 1 + 128);
static_assert(Board(3).view(0, 8) == 256 && Board(3).view(0, 9) == 256 + 135 * 8);
static_assert(Board(3).status(1, Status::kAcked) == 128 + 8832);
static_assert(Board(3).size_bytes() == 28672);

static_assert(kNumArguments == 3 && number(Argument::kMaxTokens) == 0 &&
              number(Argument::kShape) == 1 && number(Argument::kAlignment) == 2);
static_assert(encode(ShapeArgument{.hidden = 7168,
                                   .topk = 8,
                                   .element = 5,
                                   .placement = Placement::kSlotted,
                                   .layout = Layout::kPacked}) ==
              (7168U | 8U << 17 | 5U << 24 | 2U << 27 | 1U << 29));
static_assert(encode(ShapeArgument{.partial_sums = true}) == 1U << 30);
static_assert(hash_arguments({0, 0, 0}) == 0xd5a481eU);
static_assert(hash_arguments({128, 7168U | 8U << 17, 1}) == 0xcb64fdeU);

static_assert(kRegionAlignment == 4096 && kControlAlignment == 128 && kNumHalves == 2);
static_assert(sizeof(Doorbell) == 8);

constexpr Capacity kCapacity{.num_ranks = 3,
                             .num_experts = 5,
                             .max_local_experts = 2,
                             .max_tokens = 4,
                             .max_topk = 2,
                             .num_arrival_words = 2,
                             .dispatch_pitch = 144,
                             .combine_pitch = 128,
                             .rows = 24,
                             .view_rows = 24,
                             .landing_rows = 24,
                             .combine_rows = 24};
constexpr Block kBlock(kCapacity);

static_assert(kBlock.header(0, 0) == 0);
static_assert(kBlock.header(1, 2) == 8 * (3 + 2));
static_assert(kBlock.argument(0, 0, Argument::kMaxTokens) == 128);
static_assert(kBlock.argument(1, 2, Argument::kAlignment) == 128 + 8 * (5 * 3 + 2));
static_assert(kBlock.arrived(0, 0, 0) == 384);
static_assert(kBlock.arrived(1, 1, 1) == 384 + 8 * (4 * 2 + 1));
static_assert(kBlock.completed(0) == 512);
static_assert(kBlock.completed(2) == 512 + 16);
static_assert(kBlock.count(0, 0, 0) == 640);
static_assert(kBlock.count(1, 2, 4) == 640 + 8 * (5 * 5 + 4));
static_assert(kBlock.doorbell() == 896);
static_assert(kBlock.roster(0) == 1024 && kBlock.roster(2) == 1024 + 16);
static_assert(kBlock.stop() == 1024 + 24);
static_assert(kBlock.at_work() == 1152);
static_assert(kBlock.control_bytes() == 1280);
static_assert(kBlock.view_sources(0) == 4096 && kBlock.view_rows(0) == 4096 + 128);
static_assert(kBlock.combine_rows(0) == 8192);
static_assert(kBlock.view_sources(1) == 12288 && kBlock.view_rows(1) == 12288 + 128);
static_assert(kBlock.combine_rows(1) == 16384);
static_assert(kBlock.landing_sources(0) == 20480 && kBlock.landing_rows(0) == 20480 + 128);
static_assert(kBlock.landing_sources(1) == 24576 && kBlock.landing_rows(1) == 24576 + 128);
static_assert(kBlock.size_bytes() == 28672);

static_assert(kRowAlignment == 16);
static_assert(RowShape{7168, Format::kBFloat16}.pitch() == 14336);
static_assert(RowShape{7168, Format::kFp8}.scales_offset() == 7168);
static_assert(RowShape{7168, Format::kFp8}.pitch() == 7168 + 224);
static_assert(RowShape{7168, Format::kFp8Pow2}.pitch() == 7168 + 224);
static_assert(RowShape{7168, Format::kFp8Ue8m0}.pitch() == 7168 + 64);
static_assert(RowShape{1, Format::kFloat32}.pitch() == 16);
static_assert(combine_pitch(1000, DType::kBFloat16) == 2000);
static_assert(combine_pitch(1001, DType::kBFloat16) == 2016);

TEST(WireFormat, IsFrozen) { SUCCEED(); }

}  // namespace
}  // namespace tandem::layout
