// How kernels ask the host for what they cannot do themselves: send to ranks on other hosts. A ring
// of requests in mapped pinned host memory, written by any block of this rank's kernels and read by
// one thread of the host. docs/wire_format.md has the format, relay.h the reader.
//
// A request's number is taken from a counter on the device; its entry is that number modulo the
// ring's length. The writer waits until the reader has taken the request that held the entry
// before, writes the request, then, released, its stamp: number + 1, which no earlier request of
// the entry has had. The reader looks at the stamp of the next number, takes what is there, and
// says so in `taken`. It goes on looking as long as it runs, so there is no wake-up that could be
// lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "layout/control_word.h"
#include "tandem/types.h"

namespace tandem::cuda {

enum class RequestKind : std::uint8_t {
  kHeader = 1,     // of a dispatch: header, arguments and counts may be sent
  kRows = 2,       // its rows are in the outbox
  kReady = 3,      // of a combine: expert outputs are in the combine region
  kCompleted = 4,  // the operation
};

struct Request {
  RequestKind kind{};
  Operation operation{};
  std::uint8_t half = 0;
  std::uint8_t has_rows = 0;  // kRows, kReady: else peers get words only
  layout::Epoch epoch = 0;
  std::uint32_t arguments[layout::kNumArguments] = {};  // kHeader, kReady
  std::uint32_t zero = 0;
};

struct RingEntry {
  layout::Word words[3];  // a Request
  layout::Word stamp;
};

struct RequestRing {
  // An operation asks three times at most, and no rank is more than two operations ahead of its
  // peers: the ring is full only if the host's thread is held up.
  static constexpr std::uint64_t kNumEntries = 64;

  layout::Word taken;  // requests that the reader has taken
  layout::Word padding[15];
  RingEntry entries[kNumEntries];
};

static_assert(sizeof(Request) == 24 && std::is_trivially_copyable_v<Request>);
static_assert(offsetof(Request, epoch) == 4 && offsetof(Request, arguments) == 8);
static_assert(sizeof(RingEntry) == 32 && offsetof(RingEntry, stamp) == 24);
static_assert(offsetof(RequestRing, entries) == 128 && sizeof(RequestRing) == 128 + 64 * 32);

// May request `number` be written? Not while its entry may hold one that has not been taken.
TANDEM_HOST_DEVICE constexpr bool has_room(std::uint64_t number, layout::Word taken) {
  return number - taken < RequestRing::kNumEntries;
}

// `Memory` has store(Word*, Word), relaxed, and fence(), a release of the system's scope: the
// device's or the host's.
template <typename Memory>
TANDEM_HOST_DEVICE void write_request(RequestRing& ring, std::uint64_t number,
                                      const Request& request, Memory memory) {
  RingEntry& entry = ring.entries[number % RequestRing::kNumEntries];
  layout::Word words[3];
  memcpy(words, &request, sizeof request);
  for (int i = 0; i < 3; ++i) memory.store(&entry.words[i], words[i]);
  memory.fence();  // pairs with the acquire of the stamp in RequestReader::take
  memory.store(&entry.stamp, number + 1);
}

// Thread safety: one thread.
class RequestReader {
 public:
  explicit RequestReader(RequestRing& ring) : ring_(ring) {}

  // The next request, if it is there. What its writer wrote before it can be read.
  [[nodiscard]] std::optional<Request> take() {
    RingEntry& entry = ring_.entries[next_ % RequestRing::kNumEntries];
    if (std::atomic_ref(entry.stamp).load(std::memory_order_acquire) != next_ + 1) return {};
    layout::Word words[3];
    for (int i = 0; i < 3; ++i) {
      words[i] = std::atomic_ref(entry.words[i]).load(std::memory_order_relaxed);
    }
    Request request;
    std::memcpy(static_cast<void*>(&request), words, sizeof request);
    // The reads above come first. Pairs with the look at it before write_request.
    std::atomic_ref(ring_.taken).store(++next_, std::memory_order_release);
    return request;
  }

  // The writers have stopped, and begin with number 0 again. What they have left behind is nothing:
  // an operation that fails may take a number and write no request.
  void restart() {
    for (RingEntry& entry : ring_.entries) {
      std::atomic_ref(entry.stamp).store(0, std::memory_order_relaxed);
    }
    std::atomic_ref(ring_.taken).store(0, std::memory_order_relaxed);
    next_ = 0;
  }

 private:
  RequestRing& ring_;
  std::uint64_t next_ = 0;
};

}  // namespace tandem::cuda
