#include "backend/cpu/call_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tandem/array.h"

namespace tandem::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumCopies = 9;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

class CallRecorder final : public runtime::Recorder {
 public:
  [[nodiscard]] void* stream() const override { return nullptr; }

  int record(int count, std::function<void()> operation) override {
    recordings_.emplace_back(count, std::move(operation));
    return static_cast<int>(recordings_.size()) - 1;
  }

  void copy_rows(const TensorView& to, const ConstTensorView& from) override {
    copy(to, from, Backend::kCpu);
  }

  void start(int recording) override {
    const auto& [count, operation] = recordings_.at(static_cast<std::size_t>(recording));
    const Clock::time_point begin = Clock::now();
    operation();
    const Clock::time_point after_first = Clock::now();
    for (int call = 1; call < count; ++call) operation();
    const Clock::time_point end = Clock::now();
    last_ = {.all_us = microseconds(end - begin),
             .after_first_us = microseconds(end - after_first)};
  }

  runtime::RunTime finish() override { return last_; }

  [[nodiscard]] runtime::DeviceSummary device() const override {
    return {.name = "CPU, " + std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " processors",
            .num_sms = 0,
            .free_bytes = std::int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE)};
  }

  [[nodiscard]] double copy_gbs(std::int64_t size_bytes) override {
    const std::vector<char> source(static_cast<std::size_t>(size_bytes), 1);
    std::vector<char> destination(source.size());
    std::vector<double> times;
    for (int copy = 0; copy < kNumCopies; ++copy) {
      const Clock::time_point begin = Clock::now();
      std::memcpy(destination.data(), source.data(), source.size());
      times.push_back(microseconds(Clock::now() - begin));
    }
    std::sort(times.begin(), times.end());
    return 2.0 * static_cast<double>(size_bytes) / (times[times.size() / 2] * 1e3);
  }

 private:
  std::vector<std::pair<int, std::function<void()>>> recordings_;
  runtime::RunTime last_;
};

}  // namespace

std::unique_ptr<runtime::Recorder> make_call_recorder() { return std::make_unique<CallRecorder>(); }

}  // namespace tandem::cpu
