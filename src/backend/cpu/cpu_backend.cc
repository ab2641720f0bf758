#include "backend/cpu/cpu_backend.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "backend/cpu/call_recorder.h"
#include "backend/cpu/cpu_buffer.h"
#include "backend/cpu/row_ops.h"
#include "tandem/error.h"

namespace tandem::cpu {
namespace {

// Of arrays: a page, so that they are as well placed as a framework's tensors would be.
constexpr std::size_t kArrayAlignment = 4096;

class CpuBackend final : public runtime::BackendInterface {
 public:
  [[nodiscard]] Backend backend() const override { return Backend::kCpu; }

  [[nodiscard]] BackendInfo info() const override {
    BackendInfo info{
        .backend = Backend::kCpu, .built = true, .usable = true, .why_not = {}, .details = {}};
    info.details.push_back(std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " processors");
    std::string targets;
    for (const std::string& target : simd_targets()) {
      targets += (targets.empty() ? "SIMD " : ", ") + target;
    }
    info.details.push_back(targets + " (first in use)");
    return info;
  }

  [[nodiscard]] int num_arrival_words() const override { return 1; }

  [[nodiscard]] std::unique_ptr<runtime::BackendBuffer> make_buffer(
      const std::shared_ptr<runtime::Bootstrap>& bootstrap,
      const runtime::BufferPlan& plan) const override {
    return std::make_unique<CpuBuffer>(bootstrap, plan);
  }

  [[nodiscard]] std::unique_ptr<runtime::BackendBuffer> join_buffer(
      const runtime::BufferPlan& plan, runtime::Offer offer) const override {
    if (offer.network != nullptr) {
      return std::make_unique<CpuBuffer>(plan, offer.situation, *offer.network);
    }
    return std::make_unique<CpuBuffer>(plan, std::move(offer.board));
  }

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t size_bytes, int) const override {
    if (size_bytes == 0) return nullptr;
    const auto rounded = static_cast<std::size_t>(
        layout::round_up(size_bytes, static_cast<std::int64_t>(kArrayAlignment)));
    void* const memory = std::aligned_alloc(kArrayAlignment, rounded);
    if (memory == nullptr) {
      throw Error(
          ErrorCode::kResource,
          "no memory for an array of " + std::to_string(size_bytes) + " bytes, " +
              std::to_string(std::int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE)) +
              " bytes free");
    }
    return {memory, std::free};
  }

  void copy_2d(void* destination, std::int64_t destination_pitch, const void* source,
               std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
               void*) const override {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(static_cast<std::byte*>(destination) + row * destination_pitch,
                  static_cast<const std::byte*>(source) + row * source_pitch,
                  static_cast<std::size_t>(row_bytes));
    }
  }

  void use_device(int) const override {}

  [[nodiscard]] std::unique_ptr<runtime::Recorder> make_recorder(int) const override {
    return make_call_recorder();
  }
};

}  // namespace

const runtime::BackendInterface& backend() {
  static const CpuBackend instance;
  return instance;
}

}  // namespace tandem::cpu
