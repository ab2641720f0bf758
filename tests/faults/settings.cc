#include "faults/settings.h"

namespace tandem::test {

// Without a default: a point that is added must be thought of here.
Setting setting_of(Point point) {
  switch (point) {
    case Point::kBegin:
    case Point::kEntered:
    case Point::kCount:
    case Point::kArgument:
    case Point::kHeader:
    case Point::kHeadersSent:
    case Point::kHeadersCame:
    case Point::kPlanAgreed:
    case Point::kFlagRaised:
    case Point::kSources:
    case Point::kRow:
    case Point::kRowsWritten:
    case Point::kFlagLowered:
    case Point::kArrived:
    case Point::kRowsCame:
    case Point::kFinished:
    case Point::kFinishedTold:
    case Point::kStaging:
    case Point::kStaged:
    case Point::kPulling:
    case Point::kPulled:
    case Point::kCompleted:
      return Setting::kOperation;
    case Point::kWaiting:
      return Setting::kWait;
    case Point::kProposing:
    case Point::kProposed:
    case Point::kDecided:
    case Point::kAdopting:
    case Point::kAdopted:
      return Setting::kLoss;
    case Point::kTakingOver:
      return Setting::kTakeover;
    case Point::kMeeting:
    case Point::kMet:
    case Point::kBack:
      return Setting::kRecovery;
    case Point::kKnocking:
    case Point::kKnocked:
      return Setting::kMasked;
    case Point::kSeeking:
    case Point::kClaiming:
    case Point::kClaimed:
    case Point::kTakingPlace:
    case Point::kTookPlace:
      return Setting::kJoin;
    case Point::kVisiting:
    case Point::kVisited:
      return Setting::kLetIn;
    case Point::kVisitor:
    case Point::kBlockOffered:
      return Setting::kDoor;
  }
  return Setting::kOperation;
}

std::vector<Point> points_of(Setting setting) {
  std::vector<Point> points;
  for (int point = 0; point < kNumPoints; ++point) {
    if (setting_of(static_cast<Point>(point)) == setting) points.push_back(Point(point));
  }
  return points;
}

Shape entangled(int num_ranks, Placement placement) {
  Shape shape{.num_ranks = num_ranks,
              .num_experts = num_ranks + 1,
              .hidden = 24,
              .topk = num_ranks,
              .max_tokens = 6,
              .tokens = {6, 5, 4},
              .placement = placement,
              .routing = Routing::kFull};
  shape.tokens.resize(num_ranks, 3);
  shape.layout = Layout::kPacked;
  if (placement == Placement::kSlotted) {
    shape.hook = true;
    shape.format = Format::kFp8;
  }
  return shape;
}

}  // namespace tandem::test
