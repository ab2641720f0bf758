// Judges what one rank received and got back by the oracle, for whichever ranks took part.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "soak/draw.h"
#include "test_low_latency/operation.h"

namespace tandem::tools {

using Present = std::vector<bool>;  // by rank: takes part

// One case as it comes out if these ranks take part.
struct Outcome {
  reference::Problem problem;  // without the others' tokens and experts
  std::vector<reference::RankOutput> received;
  std::vector<std::vector<std::byte>> y;  // [R]
};

class Judge {
 public:
  Judge(const Memory& memory, int rank) : memory_(memory), rank_(rank) {}

  // Lives as long as this object.
  const Outcome& outcome(const SoakCase& one, const Present& present);

  // A dispatch, when `present` took part to the end, and `possible` may have at its beginning. Any
  // of those who have been lost since may count in it, so that rows lie where they would with them;
  // rows that the lost did not write are zeros of token -1. Returns the outcome that it is; nothing
  // if none, and why is in `why`.
  const Outcome* received(const SoakCase& one, const DispatchResult& result, const Present& present,
                          const Present& possible, std::string& why);

  // A combine after it in which `present` took part. "" or what is wrong.
  std::string combined(const SoakCase& one, const Outcome& outcome, const ConstTensorView& out,
                       const Present& present) const;

 private:
  [[nodiscard]] std::string compare(const SoakCase& one, const Outcome& outcome,
                                    const DispatchResult& result, const Present& present) const;

  const Memory& memory_;
  int rank_;
  std::map<std::pair<const SoakCase*, Present>, Outcome> outcomes_;
};

}  // namespace tandem::tools
