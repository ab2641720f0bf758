// A point in time by which something must have happened, or never.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace tandem::runtime {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A timeout so long that it would overflow the clock means never.
  static Deadline after(std::chrono::milliseconds timeout) {
    const Clock::time_point now = Clock::now();
    const auto room = std::chrono::duration_cast<std::chrono::milliseconds>(
        Clock::time_point::max() - now - std::chrono::hours(1));
    return timeout >= room ? Deadline(Clock::time_point::max()) : Deadline(now + timeout);
  }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  // Nanoseconds of the steady clock, which all processes of a host share. Whoever sent them may say
  // anything: what was before the clock's start has passed, and differences stay in range.
  static Deadline from_nanoseconds(std::int64_t nanoseconds) {
    return Deadline(
        Clock::time_point(std::chrono::nanoseconds(std::max<std::int64_t>(nanoseconds, 0))));
  }
  [[nodiscard]] std::int64_t nanoseconds() const {
    return std::chrono::nanoseconds(at_.time_since_epoch()).count();
  }

  [[nodiscard]] bool is_never() const { return at_ == Clock::time_point::max(); }
  [[nodiscard]] bool passed() const { return !is_never() && Clock::now() >= at_; }
  [[nodiscard]] Clock::time_point at() const { return at_; }

  [[nodiscard]] Deadline extended_by(std::chrono::milliseconds extra) const {
    return is_never() || Clock::time_point::max() - at_ < extra ? never() : Deadline(at_ + extra);
  }
  [[nodiscard]] Deadline earlier_of(const Deadline& other) const {
    return Deadline(std::min(at_, other.at_));
  }

  // For poll(2): milliseconds left, rounded up so that a wait never ends just short; -1 for ever.
  [[nodiscard]] int poll_timeout() const {
    if (is_never()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace tandem::runtime
