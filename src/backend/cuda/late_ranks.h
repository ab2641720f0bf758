// For whom this rank's kernels wait, and how long: what their notes (wait_note) add up to. A wait
// says so again and again, so silence means that it has ended.
//
// Thread safety: one caller at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "layout/control_word.h"
#include "tandem/types.h"

namespace tandem::cuda {

class LateRanks {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Wait {
    layout::Epoch epoch = 0;
    Operation operation = Operation::kNone;
    Phase phase = Phase::kNone;
    Time since{};
    Time last{};
    bool spared = false;  // it was late, but waited itself
  };

  // `interval`: between two notes of a wait.
  LateRanks(int num_ranks, std::chrono::nanoseconds interval)
      : interval_(interval), waits_(num_ranks) {}

  // What has been noted of the wait for `rank` since the last call, 0 if nothing.
  void take(int rank, layout::Word note, Time now) {
    std::optional<Wait>& wait = waits_[rank];
    if (note == 0) {
      if (wait && now - wait->last > kSilence * interval_) wait.reset();
      return;
    }
    if (!wait || wait->epoch != layout::epoch_of(note)) wait = Wait{.since = now - interval_};
    const std::uint32_t value = layout::value_of(note);
    wait->epoch = layout::epoch_of(note);
    wait->operation = static_cast<Operation>(value & 0xffU);
    wait->phase = static_cast<Phase>((value >> 8) & 0xffU);
    wait->last = now;
  }
  // A rank that waits for others itself is given as long again, whatever it does in between.
  void spare(int rank) { waits_[rank]->spared = true; }
  // Who takes part has changed: all that last are waits for others than before.
  void restart(Time now) {
    for (std::optional<Wait>& wait : waits_) {
      if (!wait) continue;
      wait->since = now;
      wait->spared = false;
    }
  }
  // Whatever it was waited for is over, or waits anew.
  void forget(int rank) { waits_[rank].reset(); }
  void forget() { std::fill(waits_.begin(), waits_.end(), std::nullopt); }

  // Nothing if this rank does not wait for it.
  [[nodiscard]] const std::optional<Wait>& of(int rank) const { return waits_[rank]; }
  // The first rank that is waited for; -1: none.
  [[nodiscard]] int first() const {
    const auto found =
        std::find_if(waits_.begin(), waits_.end(),
                     [](const std::optional<Wait>& wait) { return wait.has_value(); });
    return found == waits_.end() ? -1 : static_cast<int>(found - waits_.begin());
  }

 private:
  // Intervals: a kernel looks at its clock twice a millisecond.
  static constexpr int kSilence = 3;

  std::chrono::nanoseconds interval_;
  std::vector<std::optional<Wait>> waits_;  // by rank
};

}  // namespace tandem::cuda
