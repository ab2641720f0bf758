// How a buffer whose ranks are on several hosts stands, as one of them tells a process that is to
// become a rank of it: who takes part, as of which decision, and near which operation they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout/control_word.h"

namespace tandem::runtime {

struct Situation {
  int teller = 0;
  std::uint32_t number = 0;      // of the newest decision
  std::uint32_t num_starts = 0;  // how many decisions were new starts
  layout::Epoch near = 0;        // an operation that the teller has come to
  std::vector<bool> active;      // by rank
  std::vector<layout::Epoch> from;
  std::string options;  // those that must agree, as text

  [[nodiscard]] int num_ranks() const { return static_cast<int>(active.size()); }
};

// decode refuses what encode cannot have written.
std::vector<std::byte> encode(const Situation& situation);
std::optional<Situation> decode_situation(std::span<const std::byte> bytes);

}  // namespace tandem::runtime
