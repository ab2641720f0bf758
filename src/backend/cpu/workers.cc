#include "backend/cpu/workers.h"

#include <string>
#include <system_error>

#include "tandem/error.h"

namespace tandem::cpu {

Workers::Workers(int num_threads) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      helpers_.emplace_back([this, thread] { help(thread); });
    }
  } catch (const std::system_error& error) {
    const std::size_t started = helpers_.size();
    this->~Workers();
    throw Error(ErrorCode::kResource, "could start " + std::to_string(started) + " of " +
                                          std::to_string(num_threads - 1) +
                                          " helper threads: " + error.what());
  }
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Workers::do_share(int thread, std::int64_t num_items, const Share& work) const {
  const std::int64_t threads = num_threads();
  work(thread, num_items * thread / threads, num_items * (thread + 1) / threads);
}

void Workers::run_shared(std::int64_t num_items, const Share& work) {
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    num_items_ = num_items;
    num_busy_ = static_cast<int>(helpers_.size());
    ++turn_;
  }
  start_.notify_all();
  do_share(0, num_items, work);
  std::unique_lock lock(mutex_);
  end_.wait(lock, [this] { return num_busy_ == 0; });
}

void Workers::help(int thread) {
  for (std::uint64_t seen = 0;;) {
    std::unique_lock lock(mutex_);
    start_.wait(lock, [&] { return stopping_ || turn_ != seen; });
    if (stopping_) return;
    seen = turn_;
    const Share& work = *work_;
    const std::int64_t num_items = num_items_;
    lock.unlock();
    do_share(thread, num_items, work);
    lock.lock();
    if (--num_busy_ == 0) end_.notify_one();
  }
}

}  // namespace tandem::cpu
