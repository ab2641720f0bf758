#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

namespace tandem::test {

// Memory that processes forked later share.
template <typename T>
class Shared {
 public:
  Shared()
      : value_(new (::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                           -1, 0)) T()) {}
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// In shared memory: processes wait for each other, once, without the library. One that ends right
// after a barrier of the library's may take its last message with it, which others wait for.
class Gathering {
 public:
  void await(int num_ranks) {
    ++num_here_;
    while (num_here_ < num_ranks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic<int> num_here_{0};
};

}  // namespace tandem::test
