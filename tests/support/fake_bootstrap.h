// A bootstrap without peers: they say what this rank says, unless a derived class knows better. For
// tests in which peers are broken or hostile.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "runtime/bootstrap.h"

namespace tandem::test {

class FakeBootstrap : public runtime::Bootstrap {
 public:
  FakeBootstrap(int rank, int size) : rank_(rank), size_(size) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] bool in_one_process() const override { return true; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(100);
  }
  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override {
    return std::vector<std::vector<std::byte>>(size_, {message.begin(), message.end()});
  }
  void barrier() override {}
  [[nodiscard]] std::vector<runtime::Descriptor> all_gather_descriptors(
      const runtime::Descriptor&) override {
    return {};
  }
  [[nodiscard]] std::vector<std::shared_ptr<void>> all_gather_objects(
      std::shared_ptr<void> own) override {
    return std::vector<std::shared_ptr<void>>(size_, own);
  }

 private:
  int rank_;
  int size_;
};

}  // namespace tandem::test
