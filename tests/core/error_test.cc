#include "tandem/error.h"

#include <gtest/gtest.h>

#include <string>

namespace tandem {
namespace {

TEST(Error, SaysCodeMessageAndTheFactsThatApply) {
  using namespace std::chrono_literals;
  const Error error(ErrorInfo{.code = ErrorCode::kTimeout,
                              .operation = Operation::kCombine,
                              .epoch = 7,
                              .phase = Phase::kReady,
                              .peer = 3,
                              .expected = 7,
                              .seen = 5,
                              .waited = 1500ms,
                              .limit = 1000ms},
                    "rank 0 waited");
  EXPECT_STREQ(error.what(),
               "tandem: timeout: rank 0 waited [combine of epoch 7, phase ready, peer 3, "
               "expected 7, seen 5, waited 1500 ms of 1000 ms]");
  EXPECT_EQ(error.peer(), 3);
  EXPECT_NE(std::string(error.where().file_name()).find("error_test.cc"), std::string::npos);
}

TEST(Error, LeavesOutFactsThatDoNotApply) {
  EXPECT_STREQ(Error(ErrorCode::kUnsupported, "no device").what(),
               "tandem: unsupported: no device");
}

TEST(Error, SaysForeverForAnUnboundedWait) {
  const Error error(
      ErrorInfo{.waited = std::chrono::seconds(1), .limit = std::chrono::nanoseconds::max()}, "x");
  EXPECT_NE(std::string(error.what()).find("of forever"), std::string::npos);
}

TEST(Names, AreTheSpellingsOfTheCommandLine) {
  EXPECT_EQ(name(Format::kFp8Ue8m0), "fp8-ue8m0");
  EXPECT_EQ(name(Placement::kSlotted), "slotted");
  EXPECT_EQ(name(Layout::kPadded), "padded");
  EXPECT_EQ(name(Backend::kCuda), "cuda");
  EXPECT_EQ(name(DType::kInt64), "int64");
  EXPECT_EQ(name(Phase::kCombineHalf), "combine half");
  EXPECT_EQ(name(ErrorCode::kFailedBuffer), "failed buffer");
  EXPECT_EQ(name(ErrorCode::kMasked), "masked");
  EXPECT_EQ(name(Phase::kMembership), "membership");
  EXPECT_EQ(name(OnTimeout::kMask), "mask");
  EXPECT_EQ(name(Operation::kDispatch), "dispatch");
  EXPECT_EQ(name(static_cast<Format>(77)), "unknown");
}

}  // namespace
}  // namespace tandem
