#include "faults/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

#include "faults/settings.h"
#include "support/party.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kTimeout = 80ms;
constexpr int kDone = 0;   // gate: somebody has seen all who live together
constexpr int kDead = 1;   // gates: of rank r, kDead + r
constexpr int kPairs = 3;  // in a row, of all who live

std::ostream& operator<<(std::ostream& out, const Fault& fault) {
  return out << "rank " << fault.rank << " kind " << static_cast<int>(fault.kind) << " point "
             << static_cast<int>(fault.point) << " passing " << fault.nth << " peer " << fault.peer
             << " pause " << fault.pause.count() << " us; ";
}

// The words of one rank that go astray.
class Postman {
 public:
  explicit Postman(std::uint64_t seed) : random_(seed) {}

  void plan(const Fault& fault) { plans_.push_back(fault); }

  bool store(Point point, int peer, std::atomic_ref<layout::Word> word, layout::Word value) {
    bool stored = true;
    for (Fault& plan : plans_) {
      if (plan.nth <= 0 || plan.peer != peer) continue;
      if (plan.kind == Kind::kShuffleWords) {
        if (point == Point::kHeader) {
          deliver(peer);
          --plan.nth;
        } else if (point == Point::kCount || point == Point::kArgument) {
          held_.push_back({peer, word, value});
          stored = false;
        }
      } else if (plan.point == point && --plan.nth == 0) {
        if (plan.kind == Kind::kLoseWord) stored = false;
        if (plan.kind == Kind::kRepeatWord) stale_.push_back({peer, word, value});
      }
    }
    return stored;
  }

  // Stores again what has been stored long ago.
  void repeat() {
    for (const Letter& letter : stale_) letter.word.store(letter.value, std::memory_order_release);
    stale_.clear();
  }

 private:
  struct Letter {
    int peer;
    std::atomic_ref<layout::Word> word;
    layout::Word value;
  };

  // The order of relaxed stores before a release is nobody's.
  void deliver(int peer) {
    std::vector<Letter*> letters;
    for (Letter& letter : held_) {
      if (letter.peer == peer) letters.push_back(&letter);
    }
    std::shuffle(letters.begin(), letters.end(), random_);
    for (const Letter* letter : letters) {
      letter->word.store(letter->value, std::memory_order_relaxed);
    }
    std::deque<Letter> others;
    for (const Letter& letter : held_) {
      if (letter.peer != peer) others.push_back(letter);
    }
    held_.swap(others);
  }

  std::mt19937_64 random_;
  std::vector<Fault> plans_;
  std::deque<Letter> held_;
  std::deque<Letter> stale_;
};

bool is_expected(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kPeerLost ||
         code == ErrorCode::kMasked || code == ErrorCode::kMismatch ||
         code == ErrorCode::kFailedBuffer;
}

Present alive(int num_ranks, const Common& common) {
  Present present(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) present[rank] = !common.is_open(kDead + rank);
  return present;
}

// Has everybody ended who could let this rank in?
bool is_stranded(const Present& active, const Present& living) {
  for (std::size_t rank = 0; rank < active.size(); ++rank) {
    if (active[rank] && living[rank]) return false;
  }
  return true;
}

// Runs operations, comes back after errors, lets others in, until all who live have run some
// together. Every operation is judged by the oracle. `after_pair` is told how many have been run.
void live(Rank& rank, Party& party, Buffer& buffer, const Common& common,
          const std::function<void(int)>& after_pair) {
  const auto start = std::chrono::steady_clock::now();
  bool failed = false;
  for (int pairs = 0, good = 0; good < kPairs;) {
    if (!rank.expect(std::chrono::steady_clock::now() - start < 40s, "does not come together")) {
      return;
    }
    try {
      if (failed) buffer.recover();
      failed = false;
      const Present living = alive(rank.size(), common);
      for (int other = 0; other < rank.size(); ++other) {
        if (buffer.active()[other] || !living[other]) continue;
        try {
          buffer.unmask(other);
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kOrder) throw;  // kOrder: it is not there yet
        }
      }
      const Present seen = party.run(buffer);
      after_pair(++pairs);
      good = seen == alive(rank.size(), common) && pairs > 2 * kPairs ? good + 1 : 0;
    } catch (const Error& error) {
      if (common.is_open(kDone)) return;
      rank.expect(is_expected(error.code()), error.what());
      if (failed && is_stranded(buffer.active(), alive(rank.size(), common))) return;
      failed = true;
      good = 0;
    }
    if (common.is_open(kDone) && good == 0) return;
  }
  common.open(kDone);
}

Schedule draw(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  const int num_ranks = 3 + below(3);
  Schedule schedule{
      .shape = entangled(num_ranks, below(2) == 0 ? Placement::kPacked : Placement::kSlotted),
      .on_timeout = below(2) == 0 ? OnTimeout::kFail : OnTimeout::kMask};
  schedule.shape.seed = seed;
  schedule.shape.zero_copy = below(2) == 0;
  if (below(2) == 0) schedule.shape.layout = Layout::kPadded;
  const int mortal = below(num_ranks);
  for (int count = 1 + below(4); count > 0; --count) {
    Fault fault{.rank = below(num_ranks),
                .kind = static_cast<Kind>(below(5)),
                .point = static_cast<Point>(below(kNumPoints)),
                .nth = 1 + below(12),
                .peer = below(num_ranks),
                .pause = std::chrono::microseconds(below(3) * kTimeout / 1us + below(20'000))};
    if (fault.kind == Kind::kEnd) fault.rank = mortal;
    if (fault.kind == Kind::kLoseWord || fault.kind == Kind::kRepeatWord) {
      constexpr Point kWords[] = {Point::kCount, Point::kArgument, Point::kHeader, Point::kArrived,
                                  Point::kCompleted};
      fault.point = kWords[below(5)];
    }
    schedule.faults.push_back(fault);
  }
  return schedule;
}

void run_drawn(std::uint64_t seed) {
  const Schedule schedule = draw(seed);
  std::ostringstream text;
  text << "TANDEM_FAULT_SEED=" << seed << ": "
       << (schedule.on_timeout == OnTimeout::kMask ? "mask" : "fail") << ", " << schedule.shape
       << ": ";
  for (const Fault& fault : schedule.faults) text << fault;
  SCOPED_TRACE(text.str());
  run_schedule(schedule);
}

}  // namespace

void run_schedule(const Schedule& schedule) {
  const Oracles oracles(schedule.shape);
  const Common common;
  std::vector<int> may_die;
  for (const Fault& fault : schedule.faults) {
    if (fault.kind == Kind::kEnd) may_die.push_back(fault.rank);
  }
  run_ranks(schedule.shape.num_ranks,
            [&](Rank& rank) {
              BufferOptions options = options_for(schedule.shape);
              options.on_timeout = schedule.on_timeout;
              options.timeout = kTimeout;
              options.first_epoch = 0xfffffff8U;
              Buffer buffer(rank.communicator(), options);
              Party party(rank, oracles, buffer);
              Script script(&common);
              Postman postman(schedule.shape.seed + rank.index());
              for (const Fault& fault : schedule.faults) {
                if (fault.rank != rank.index()) continue;
                if (fault.kind == Kind::kEnd) {
                  script.at(fault.point, fault.nth, [&] {
                    common.open(kDead + rank.index());
                    rank.die();
                  });
                } else if (fault.kind == Kind::kStop) {
                  script.at(fault.point, fault.nth,
                            [&fault] { std::this_thread::sleep_for(fault.pause); });
                } else {
                  postman.plan(fault);
                  // Over a fresh word that its reader may not have seen.
                  script.at(Point::kHeadersSent, 5, [&] { postman.repeat(); });
                }
              }
              script.on_store([&](Point point, int peer, std::atomic_ref<layout::Word> word,
                                  layout::Word value) {
                return peer == rank.index() || postman.store(point, peer, word, value);
              });
              bool injected = false;
              live(rank, party, buffer, common, [&](int pairs) {
                if (!injected) script.inject(party.handle());
                injected = true;
                if (pairs % 2 == 0) postman.repeat();
              });
              if (injected) Script().inject(party.handle());
            },
            {.may_die = may_die});
}

void run_drawn_schedules(std::chrono::seconds duration) {
  const char* const given = std::getenv("TANDEM_FAULT_SEED");
  if (given != nullptr) return run_drawn(std::strtoull(given, nullptr, 10));
  std::random_device device;
  const std::uint64_t first = std::uint64_t{device()} << 20;
  const auto start = std::chrono::steady_clock::now();
  int count = 0;
  for (; std::chrono::steady_clock::now() - start < duration && !testing::Test::HasFailure();
       ++count) {
    run_drawn(first + count);
  }
  std::cout << count << " schedules from seed " << first << '\n';
}

}  // namespace tandem::test
