// Messages of peers on other hosts that are to be stored into this rank's memory: each is dropped,
// or lands within the block (whose neighbours nobody may touch) or the landing memory; or a carrier
// is told to bring it there.
#include <cstring>
#include <list>
#include <memory>
#include <vector>

#include "backend/net/remote_link.h"
#include "fuzz/check.h"
#include "support/guarded_block.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;

constexpr std::int64_t kBlockBytes = 8192;
constexpr std::int64_t kControlBytes = 1024;
constexpr std::int64_t kLandingBytes = 4096;

template <typename T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto more = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// Must be told of nothing outside the block, its control words or the landing memory.
class CheckingCarrier final : public runtime::Carrier {
 public:
  std::byte* room(int, layout::Epoch, std::int64_t size_bytes) override {
    if (size_bytes > 2000) return nullptr;
    return rooms_.emplace_back(static_cast<std::size_t>(size_bytes)).data();
  }
  std::byte* landing() override { return landing_.data(); }
  void carry_to_block(const Rows& rows) override {
    check(lies_in(rows.offset, rows.size_bytes, kBlockBytes), "rows lie in the block");
    check(lies_in(rows.sources_offset, rows.sources_bytes, kBlockBytes), "and their sources");
    for (std::int64_t i = 0; i < rows.size_bytes + rows.sources_bytes; ++i) sum_ += rows.room[i];
  }
  void carry_to_landing(std::int64_t offset, std::int64_t size_bytes) override {
    check(lies_in(offset, size_bytes, 2 * kLandingBytes), "outputs lie in the landing memory");
  }
  void carry_words(int, std::int64_t offset, std::span<const layout::Word> words) override {
    check(lies_in(offset, static_cast<std::int64_t>(words.size_bytes()), kControlBytes),
          "words lie among the control words");
    for (const std::byte byte : std::as_bytes(words)) sum_ += byte;
  }
  void lost(int) override {}

 private:
  // Read, so that the sanitizer sees where.
  struct Sum {
    unsigned value = 0;
    void operator+=(std::byte byte) { value += std::to_integer<unsigned>(byte); }
  };

  static bool lies_in(std::int64_t offset, std::int64_t size_bytes, std::int64_t end) {
    return offset >= 0 && size_bytes >= 0 && size_bytes <= end && offset <= end - size_bytes;
  }

  std::list<std::vector<std::byte>> rooms_;
  std::vector<std::byte> landing_ = std::vector<std::byte>(2 * kLandingBytes);
  Sum sum_;
};

std::vector<std::byte> payload_of(FuzzedDataProvider& data, net::MessageKind kind) {
  std::vector<std::byte> payload;
  if (kind == net::MessageKind::kWords) {
    const int num_runs = data.ConsumeIntegralInRange(0, 3);
    for (int i = 0; i < num_runs; ++i) {
      const std::int64_t count = data.ConsumeIntegralInRange(0, 8);
      append(payload, net::RunHeader{.offset = fuzz::awkward<std::int64_t>(
                                         data, 8 * data.ConsumeIntegralInRange(0, 128)),
                                     .count = fuzz::awkward<std::int64_t>(data, count)});
      for (std::int64_t word = 0; word < count; ++word) append(payload, ~std::uint64_t{0});
    }
  } else {
    payload.resize(data.ConsumeIntegralInRange<std::size_t>(0, 9000), std::byte{0x55});
  }
  return payload;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  const test::GuardedBlock block(kBlockBytes);
  const auto carrier = data.ConsumeBool() ? std::make_shared<CheckingCarrier>() : nullptr;
  const auto inbox = std::make_shared<net::Inbox>(
      runtime::RemoteMemory{.block = carrier ? nullptr : block.memory(),
                            .block_bytes = kBlockBytes,
                            .control_bytes = kControlBytes,
                            .staging_bytes = 0,
                            .landing_bytes = kLandingBytes,
                            .wake = [] {},
                            .carrier = carrier},
      2);
  inbox->listen([](int, std::span<const std::byte>) {}, [](int, bool) { return true; });
  const int num_messages = data.ConsumeIntegralInRange(1, 6);
  for (int i = 0; i < num_messages; ++i) {
    const auto kind = static_cast<net::MessageKind>(data.ConsumeIntegralInRange(0U, 6U));
    const auto num_sources = data.ConsumeIntegralInRange(0U, 4U);
    std::vector<std::byte> header;
    append(header, net::BufferHeader{.sequence = fuzz::awkward<std::uint64_t>(data, i),
                                     .kind = static_cast<std::uint32_t>(kind),
                                     .num_sources = fuzz::awkward<std::uint32_t>(data, num_sources),
                                     .offset = fuzz::awkward<std::int64_t>(
                                         data, 16 * data.ConsumeIntegralInRange(0, 512)),
                                     .sources_offset = fuzz::awkward<std::int64_t>(
                                         data, 4 * data.ConsumeIntegralInRange(0, 2048)),
                                     .epoch = data.ConsumeIntegral<std::uint32_t>(),
                                     .zero = 0});
    header.resize(header.size() + num_sources * sizeof(std::int32_t));
    const std::vector<std::byte> payload = payload_of(data, kind);
    // On the heap, whose ends the sanitizer guards.
    const auto delivery = inbox->accept(data.ConsumeIntegralInRange(0, 1), header, payload.size());
    if (!delivery) continue;
    check(payload.empty() || delivery->where != nullptr, "there is room for a message");
    if (!payload.empty()) std::memcpy(delivery->where, payload.data(), payload.size());
    if (data.ConsumeIntegralInRange(0, 7) == 0) {  // another process takes the peer's place
      inbox->peer_lost(1);
      static_cast<void>(inbox->let_come(1, true));
    }
    delivery->done();
  }
  return 0;
}
