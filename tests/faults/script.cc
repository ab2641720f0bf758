#include "faults/script.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include "backend/cpu/cpu_buffer.h"
#include "runtime/buffer_state.h"

namespace tandem::test {

using namespace std::chrono_literals;

namespace {

cpu::CpuBuffer& end_of(const DispatchHandle& handle) {
  return dynamic_cast<cpu::CpuBuffer&>(handle.state()->buffer.lock()->backend_end());
}

}  // namespace

Common::Common() {
  void* const memory =
      mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = new (memory) Memory{};
}

Common::~Common() { munmap(memory_, sizeof(Memory)); }

void Common::wait(int gate) const {
  const auto start = std::chrono::steady_clock::now();
  while (!is_open(gate)) {
    if (std::chrono::steady_clock::now() - start > 30s) {
      throw std::runtime_error("nobody opened gate " + std::to_string(gate));
    }
    std::this_thread::sleep_for(200us);
  }
}

void Script::at(Point point, int nth, std::function<void()> action, int peer) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({point, nth, std::move(action), peer});
}

void Script::inject(const DispatchHandle& handle) { end_of(handle).inject(this); }

void Script::set_timeout(const DispatchHandle& handle, std::chrono::nanoseconds timeout) {
  end_of(handle).set_timeout(timeout);
}

void Script::pass(Point point, int peer) {
  if (common_ != nullptr) common_->hit(point);
  std::vector<std::function<void()>> actions;  // they may add others, and wait
  {
    const std::lock_guard lock(mutex_);
    for (Entry& entry : entries_) {
      if (entry.point != point || (entry.peer >= 0 && entry.peer != peer)) continue;
      if (--entry.left == 0) actions.push_back(entry.action);
    }
  }
  for (const std::function<void()>& action : actions) action();
}

bool Script::store(Point point, int peer, std::atomic_ref<layout::Word> word, layout::Word value) {
  const auto dropped = std::find(dropped_.begin(), dropped_.end(), std::pair(point, peer));
  if (dropped != dropped_.end()) {
    dropped_.erase(dropped);
    return false;
  }
  return !store_ || store_(point, peer, word, value);
}

}  // namespace tandem::test
