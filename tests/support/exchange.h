// Exchange: one rank's tensors for one scenario, and the calls on them. Every tensor that the
// library writes lies between guard rows, which are checked with the results.
//
// The steps keep the rule for ranks that are threads on one GPU (see Rank::fence): nothing is
// allocated, copied or waited for between one rank's launch and its peers'. So all ranks must take
// the same steps; on CPUs the steps add no barrier of their own.
#pragma once

#include <memory>
#include <string>

#include "support/compare.h"
#include "support/scenario.h"
#include "support/world.h"

namespace tandem::test {

// A tensor [outer.., width] whose rows may be apart, inside an allocation with guards around it.
class GuardedTensor {
 public:
  GuardedTensor() = default;
  GuardedTensor(DType dtype, std::int64_t num_rows, std::int64_t width, std::int64_t gap,
                void* stream);

  // [num_rows, width], or [outer, inner, width] where num_rows = outer * inner.
  [[nodiscard]] TensorView view() const;
  [[nodiscard]] TensorView view(std::int64_t outer, std::int64_t inner) const;

  // Overwrites all of it, guards and gaps too, with the pattern that it was made with.
  void poison(void* stream) const;

  // Are the rows before and after, and the gaps between rows, as they were?
  [[nodiscard]] bool guards_intact(void* stream) const;

  // Is all of it as it was made?
  [[nodiscard]] bool untouched(void* stream) const;

 private:
  Array array_;
  std::int64_t num_rows_ = 0;
  std::int64_t width_ = 0;
};

class Exchange {
 public:
  // Allocates and uploads.
  Exchange(Rank& rank, const Scenario& scenario, const Buffer& buffer);

  // The steps of a pair. With a hook, dispatch and combine only send. Tensors to be written are
  // poisoned first, so that an exchange may run again and again.
  void dispatch(Buffer& buffer);
  void finish_dispatch();
  void check_received();
  void provide_outputs(Buffer& buffer);  // zero-copy: writes y where peers will read it
  void combine(Buffer& buffer);
  void finish_combine();
  void check_combined();

  // All of them.
  void run(Buffer& buffer);

  // For tests that call the operations themselves.
  [[nodiscard]] const Scenario& scenario() const { return scenario_; }
  [[nodiscard]] ConstTensorView x() const { return x_; }
  [[nodiscard]] ConstTensorView topk_idx() const { return topk_idx_; }
  [[nodiscard]] ConstTensorView topk_weights() const { return topk_weights_; }
  [[nodiscard]] ConstTensorView staged_y() const { return y_; }
  [[nodiscard]] TensorView out() const;
  [[nodiscard]] DispatchOptions dispatch_options() const;
  [[nodiscard]] CombineOptions combine_options() const;
  DispatchResult& result() { return result_; }
  [[nodiscard]] const Hook& combine_hook() const { return combine_hook_; }
  [[nodiscard]] const GuardedTensor& recv_x() const { return recv_x_; }
  [[nodiscard]] bool out_is_guarded() const { return out_.guards_intact(rank_.stream()); }

 private:
  [[nodiscard]] const Shape& shape() const { return scenario_.shape; }
  [[nodiscard]] bool slotted() const;
  [[nodiscard]] TensorView received_view(const GuardedTensor& tensor) const;
  void note(const std::string& report, const char* step);

  Rank& rank_;
  const Scenario& scenario_;
  std::int64_t num_local_ = 0;
  Array x_array_, idx_array_, weights_array_, y_array_;
  TensorView x_, topk_idx_, topk_weights_, y_;
  GuardedTensor recv_x_, recv_scales_, out_;
  DispatchResult result_;
  TensorView outputs_;  // what combine will be given
  Hook combine_hook_;
};

// One pair of operations on a buffer of its own, on all ranks: the body of most tests.
void run_scenario(const Scenario& scenario);
void run_scenario(const Shape& shape);

// One pair per shape, one after the other on one buffer that serves them all. The shapes must agree
// on ranks and experts.
void run_in_turn(const std::vector<Shape>& shapes);

}  // namespace tandem::test
