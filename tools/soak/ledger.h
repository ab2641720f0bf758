// What the ranks of a soak tell each other and the command outside of the library: memory that
// forked ranks share.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>

namespace tandem::tools {

inline constexpr int kMaxSoakRanks = 64;

struct Ledger {
  // Of the whole run.
  std::atomic<std::int64_t> operations{0};
  std::atomic<std::int64_t> rows{0};
  std::atomic<std::int64_t> replays{0};  // runs of recordings, of several operations each
  std::atomic<std::int64_t> ended{0};
  std::atomic<std::int64_t> stopped{0};
  std::atomic<std::int64_t> delayed{0};
  std::atomic<std::int64_t> returned{0};  // let in again, by recover() or join()
  std::atomic<std::int64_t> joined{0};    // of these: in place of one that had ended
  std::atomic<std::int64_t> expected_errors{0};
  std::atomic<std::int64_t> unexpected_errors{0};

  // Of the session at hand.
  struct Rank {
    std::atomic<int> process{0};
    std::atomic<bool> faulted{false};  // something has been done to it
    std::atomic<bool> dead{false};     // has been ended, and nobody is in its place yet
    std::atomic<bool> must_leave{false};
    std::atomic<int> nap_ms{0};             // to be slept before its next call
    std::atomic<std::int64_t> joins_at{0};  // the pair to go on with when it is let in
  };
  Rank ranks[kMaxSoakRanks];
  std::atomic<std::int64_t> last_pair{-1};  // -1: not yet known
  std::atomic<bool> over{false};

  void begin_session() {
    for (Rank& rank : ranks) {
      rank.process = 0;
      rank.faulted = rank.dead = rank.must_leave = false;
      rank.nap_ms = 0;
      rank.joins_at = 0;
    }
    last_pair = -1;
    over = false;
  }
};

class SharedLedger {
 public:
  SharedLedger() {
    void* const memory =
        mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    ledger_ = new (memory) Ledger;
  }
  ~SharedLedger() { munmap(ledger_, sizeof(Ledger)); }
  SharedLedger(const SharedLedger&) = delete;
  SharedLedger& operator=(const SharedLedger&) = delete;
  Ledger& operator*() const { return *ledger_; }
  Ledger* operator->() const { return ledger_; }

 private:
  Ledger* ledger_;
};

}  // namespace tandem::tools
