// One rank's tensors for one combination on one problem, and the operations on them: what a caller
// of the library would hold and write.
#pragma once

#include <array>

#include "common/memory.h"
#include "tandem/buffer.h"
#include "test_low_latency/expectation.h"

namespace tandem::tools {

// The buffer that a combination needs, and nothing that it does not.
BufferOptions buffer_options(const TestOptions& options, const Scenario& scenario,
                             const Combination& combination);

// Whether a buffer made for one may serve the other.
bool share_buffer(const Combination& a, const Combination& b);

// Two rounds of dispatch and combine may be under way at once, in the two halves of the buffer.
inline constexpr int kNumRounds = 2;

class Operation {
 public:
  // Allocates and uploads. All must outlive it.
  Operation(Buffer& buffer, const Memory& memory, const Combination& combination,
            const Expectation& expectation);

  // The operations of a round; with a hook they run the send phase and leave the hook in
  // received(round).hook and combine_hook(). Round 1 passes the selections as int32, round 0 as
  // int64.
  void dispatch(int round);
  void take_combine_buffer(int round);  // zero-copy: where y goes
  void combine(int round);

  // Waits until what was launched has ended; throws its error if it failed.
  void settle();

  // What the round's dispatch gave. Rounds share recv_x: read one's before the next dispatch.
  [[nodiscard]] const DispatchResult& received(int round) const { return rounds_[round].received; }
  [[nodiscard]] const TensorView& y(int round) const { return rounds_[round].y; }
  [[nodiscard]] const Hook& combine_hook() const { return combine_hook_; }
  [[nodiscard]] const Array& out() const { return out_; }
  [[nodiscard]] const Array& recv_x() const { return recv_x_; }  // no tensor if packed placement
  [[nodiscard]] bool combine_buffer_taken() const { return combine_buffer_taken_; }

 private:
  struct Round {
    DispatchResult received;
    TensorView y;
  };

  Buffer& buffer_;
  const Memory& memory_;
  Combination combination_;
  DispatchOptions dispatch_options_;
  DType dtype_;
  Array x_, wide_indices_, narrow_indices_, weights_, out_;
  Array recv_x_, recv_scales_;  // slotted placement
  Array staged_y_;              // not zero-copy; rounds compute the same
  std::array<Round, kNumRounds> rounds_;
  Hook combine_hook_;
  bool combine_buffer_taken_ = false;
};

}  // namespace tandem::tools
