// One rank among others of whom some may be lost: runs pairs of operations and judges each by the
// oracle, for whoever took part according to its handle.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "support/exchange.h"

namespace tandem::test {

// By rank: who takes part.
using Present = std::vector<bool>;

[[nodiscard]] Present all_but(int num_ranks, const std::vector<int>& lost);

// One problem, and what comes out for every set of ranks that may be left. Made before ranks start.
class Oracles {
 public:
  explicit Oracles(const Shape& shape);
  [[nodiscard]] const Shape& shape() const { return scenarios_.begin()->second.shape; }
  [[nodiscard]] const Scenario& of(const Present& present) const { return scenarios_.at(present); }
  [[nodiscard]] const std::map<Present, Scenario>& scenarios() const { return scenarios_; }

 private:
  std::map<Present, Scenario> scenarios_;
};

class Party {
 public:
  Party(Rank& rank, const Oracles& oracles, Buffer& buffer);

  // A pair of operations. Throws what they throw. Returns who took part in both.
  Present run(Buffer& buffer);

  // The same, with something done between the two.
  Present run(Buffer& buffer, const std::function<void()>& between);

  [[nodiscard]] const DispatchHandle& handle() const { return handle_; }
  // Rows of the last dispatch that were counted and lost.
  [[nodiscard]] int num_blank_rows() const { return num_blank_rows_; }

  // The tensors and calls of the problem as it is when these are there; without an argument, all.
  [[nodiscard]] Exchange& exchange(const Present& present);
  [[nodiscard]] Exchange& exchange() { return exchange(Present(buffer_.num_ranks(), true)); }

 private:
  // Judges a dispatch in which `present` took part to the end. Rows of others may have been counted
  // before they were lost: then they are right, or all zeros of token -1. Returns by whose counts
  // rows were placed.
  Present judge_received(const Present& present, const DispatchResult& result);
  void judge_combined(const Present& placed, const Present& present, const Exchange& used);

  Rank& rank_;
  const Oracles& oracles_;
  Buffer& buffer_;
  std::map<Present, std::unique_ptr<Exchange>> exchanges_;
  DispatchHandle handle_;
  int num_blank_rows_ = 0;
};

// Ranks call what does not match, and all get an error. They are to recover.
void fail_together(Rank& rank, Party& party, Buffer& buffer);

}  // namespace tandem::test
