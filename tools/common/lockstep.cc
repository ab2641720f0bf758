#include "common/lockstep.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <span>
#include <utility>

namespace tandem::tools {

namespace {

// Leaves a step whose substep failed; the substep has kept the reason.
struct SubstepFailed {};

}  // namespace

bool Lockstep::step(std::string_view what, const std::function<void()>& work) {
  std::array<std::byte, 1> well = {std::byte{1}};
  try {
    work();
  } catch (const SubstepFailed&) {
    well[0] = std::byte{0};
  } catch (const std::exception& error) {
    well[0] = std::byte{0};
    errors_.push_back(fmt::format("{}: {}", what, error.what()));
  }
  const std::vector<std::vector<std::byte>> all = communicator_.all_gather(well);
  return std::all_of(all.begin(), all.end(), [](const std::vector<std::byte>& flag) {
    return flag.size() == 1 && flag[0] == std::byte{1};
  });
}

void Lockstep::substep(std::string_view what, const std::function<void()>& work) {
  if (!step(what, work)) throw SubstepFailed{};
}

double Lockstep::largest(double value) {
  double largest = value;
  for (const auto& message : communicator_.all_gather(std::as_bytes(std::span(&value, 1)))) {
    double other = value;
    if (message.size() == sizeof(other)) std::memcpy(&other, message.data(), sizeof(other));
    largest = std::max(largest, other);
  }
  return largest;
}

std::vector<std::string> Lockstep::take_errors() { return std::exchange(errors_, {}); }

}  // namespace tandem::tools
