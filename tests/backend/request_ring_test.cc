// The ring of requests from kernels to the host: order, back-pressure, wrap. The writers are
// threads here; the device's kernels use the same code with their own loads and stores.
#include "backend/cuda/request_ring.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

namespace tandem::cuda {
namespace {

struct HostMemory {
  void store(layout::Word* word, layout::Word value) const {
    std::atomic_ref(*word).store(value, std::memory_order_relaxed);
  }
  void fence() const { std::atomic_thread_fence(std::memory_order_release); }
};

Request numbered(std::uint32_t number) {
  return {.kind = RequestKind::kRows,
          .operation = Operation::kDispatch,
          .half = static_cast<std::uint8_t>(number % 2),
          .has_rows = 1,
          .epoch = number,
          .arguments = {number + 1, number + 2, number + 3},
          .zero = 0};
}

void expect_number(const Request& request, std::uint32_t number) {
  EXPECT_EQ(request.kind, RequestKind::kRows);
  EXPECT_EQ(request.half, number % 2);
  EXPECT_EQ(request.epoch, number);
  EXPECT_EQ(request.arguments[2], number + 3);
}

TEST(RequestRing, TakesRequestsInTheOrderOfTheirNumbers) {
  RequestRing ring{};
  RequestReader reader(ring);
  EXPECT_FALSE(reader.take());
  write_request(ring, 1, numbered(1), HostMemory());
  EXPECT_FALSE(reader.take()) << "the first is still being written";
  write_request(ring, 0, numbered(0), HostMemory());
  expect_number(*reader.take(), 0);
  expect_number(*reader.take(), 1);
  EXPECT_FALSE(reader.take());
}

TEST(RequestRing, HasRoomUntilItIsFullAndAgainForEachThatIsTaken) {
  RequestRing ring{};
  RequestReader reader(ring);
  std::uint64_t written = 0;
  for (; has_room(written, ring.taken); ++written) {
    write_request(ring, written, numbered(static_cast<std::uint32_t>(written)), HostMemory());
  }
  EXPECT_EQ(written, RequestRing::kNumEntries);
  // For more than one lap, so that no entry is taken for what it was a lap before.
  for (std::uint32_t next = 0; next < 3 * RequestRing::kNumEntries; ++next) {
    EXPECT_FALSE(has_room(written, ring.taken));
    expect_number(*reader.take(), next);
    EXPECT_TRUE(has_room(written, ring.taken));
    write_request(ring, written, numbered(static_cast<std::uint32_t>(written)), HostMemory());
    ++written;
  }
}

// An operation that fails may leave a number out, and requests behind it.
TEST(RequestRing, BeginsAnewWithoutWhatWasLeftBehind) {
  RequestRing ring{};
  RequestReader reader(ring);
  write_request(ring, 0, numbered(0), HostMemory());
  write_request(ring, 2, numbered(2), HostMemory());
  write_request(ring, 3, numbered(3), HostMemory());
  expect_number(*reader.take(), 0);
  EXPECT_FALSE(reader.take());
  reader.restart();
  EXPECT_TRUE(has_room(RequestRing::kNumEntries - 1, ring.taken));
  write_request(ring, 0, numbered(10), HostMemory());
  write_request(ring, 1, numbered(11), HostMemory());
  expect_number(*reader.take(), 10);
  expect_number(*reader.take(), 11);
  EXPECT_FALSE(reader.take()) << "what follows is of before";
}

TEST(RequestRing, LosesAndMixesUpNothingOfManyWritersWhileItIsFull) {
  constexpr int kNumWriters = 4;
  constexpr std::uint64_t kNumRequests = 20'000;
  const auto ring = std::make_unique<RequestRing>();
  std::atomic<std::uint64_t> counter = 0;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kNumWriters; ++writer) {
    writers.emplace_back([&] {
      for (std::uint64_t number = counter++; number < kNumRequests; number = counter++) {
        while (!has_room(number, std::atomic_ref(ring->taken).load(std::memory_order_acquire))) {
          std::this_thread::yield();
        }
        write_request(*ring, number, numbered(static_cast<std::uint32_t>(number)), HostMemory());
      }
    });
  }
  RequestReader reader(*ring);
  for (std::uint32_t next = 0; next < kNumRequests;) {
    if (const auto request = reader.take()) {
      expect_number(*request, next++);
    } else {
      std::this_thread::yield();
    }
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_FALSE(reader.take());
}

}  // namespace
}  // namespace tandem::cuda
