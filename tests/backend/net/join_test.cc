// Processes that become ranks of a buffer whose ranks are on several hosts: where several go and
// come at once, go again while they come, or come back behind a link that was down; and what
// strangers may do at a door. (What ranks of one host do too is in conformance/rejoin_test.cc.)
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "runtime/buffer_state.h"
#include "runtime/launch.h"
#include "support/hosts.h"
#include "support/party.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;
using runtime::BufferState;
using runtime::Point;

constexpr int kPairs = 4;  // that all run together in the end
constexpr auto kPatience = 40s;

Shape entangled(int num_ranks) {
  return {.num_ranks = num_ranks,
          .num_experts = 2 * num_ranks + 1,
          .hidden = 72,
          .topk = 4,
          .max_tokens = 8,
          .layout = Layout::kPacked,
          .routing = Routing::kFull};
}

// Kills its process at a point, and says so before, to other processes.
class Death final : public runtime::Faults {
 public:
  Death(Point at, std::atomic<bool>& is_near) : at_(at), is_near_(&is_near) {}
  void pass(Point point, int) override {
    if (point != at_) return;
    *is_near_ = true;
    ::raise(SIGKILL);
  }
  bool store(Point, int, std::atomic_ref<layout::Word>, layout::Word) override { return true; }

 private:
  Point at_;
  std::atomic<bool>* is_near_;
};

// Takes its time at a point.
class Slow final : public runtime::Faults {
 public:
  explicit Slow(Point at) : at_(at) {}
  void pass(Point point, int) override {
    if (point == at_) std::this_thread::sleep_for(100ms);
  }
  bool store(Point, int, std::atomic_ref<layout::Word>, layout::Word) override { return true; }

 private:
  Point at_;
};

// At a point, passed for the first time, says so to other processes, and waits until something has
// happened in one of them, or would have.
class Meeting final : public runtime::Faults {
 public:
  struct Stop {
    Point at;
    std::atomic<bool>* is_here = nullptr;
    std::atomic<bool>* awaited = nullptr;
    bool has_passed = false;
  };
  explicit Meeting(std::vector<Stop> stops) : stops_(std::move(stops)) {}
  void add(const Stop& stop) { stops_.push_back(stop); }
  void pass(Point point, int) override {
    for (Stop& stop : stops_) {
      if (point != stop.at || std::exchange(stop.has_passed, true)) continue;
      if (stop.is_here != nullptr) *stop.is_here = true;
      if (stop.awaited == nullptr) continue;
      for (int i = 0; i < 2000 && !*stop.awaited; ++i) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(100ms);  // messages of before arrive
    }
  }
  bool store(Point, int, std::atomic_ref<layout::Word>, layout::Word) override { return true; }

 private:
  std::vector<Stop> stops_;
};

// A buffer's ranks, and further processes, each of which is to be one of them later.
class Job {
 public:
  // `place`: the host of each process, ranks first.
  Job(int num_ranks, std::vector<int> place)
      : place_(std::move(place)), shape_(entangled(num_ranks)), oracles_(shape_) {
    static_cast<void>(hosts());
    rendezvous_ = unused_address(place_.front());
    for (const int host : place_) addresses_.push_back(unused_address(host));
  }

  void set_timeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }
  [[nodiscard]] int num_ranks() const { return shape_.num_ranks; }
  [[nodiscard]] const Oracles& oracles() const { return oracles_; }
  [[nodiscard]] const std::string& address(int process) const { return addresses_[process]; }

  [[nodiscard]] BufferOptions options(int process) const {
    BufferOptions options = options_for(shape_);
    options.on_timeout = OnTimeout::kMask;
    options.timeout = timeout_;
    options.door = "of the test";
    options.door_address = addresses_[process];
    return options;
  }

  // All processes run it; those that `may_die` may be killed.
  void run(const std::vector<int>& may_die, const std::function<void(int process)>& body) const {
    const auto exits =
        run_processes(static_cast<int>(place_.size()), [&](const Communicator& everyone) {
          hosts().enter(place_[everyone.rank()]);
          body(everyone.rank());
          return 0;
        });
    for (int process = 0; process < static_cast<int>(exits.size()); ++process) {
      const ProcessExit& exit = exits[process];
      EXPECT_EQ(exit.error, "") << "process " << process;
      const bool may = std::ranges::find(may_die, process) != may_die.end();
      EXPECT_TRUE(exit.signal == 0 || (may && exit.signal == SIGKILL)) << process;
    }
  }

  [[nodiscard]] Communicator connect(int rank) const {
    return Communicator::connect_across_hosts(rendezvous_, kSecret, rank, num_ranks());
  }

  // A process that is to be `rank`, through the door of process `guide`; it asks until its
  // predecessor has gone.
  [[nodiscard]] Buffer join(int process, int rank, int guide, runtime::Faults* faults) const {
    for (const auto start = std::chrono::steady_clock::now();;) {
      try {
        return Buffer(std::make_shared<BufferState>(
            rank, options(process),
            BufferState::Entrance{.address = addresses_[guide], .secret = kSecret}, faults));
      } catch (const Error& error) {
        const bool is_early =
            error.code() == ErrorCode::kOrder || error.code() == ErrorCode::kTimeout;
        if (!is_early || std::chrono::steady_clock::now() - start > kPatience) throw;
        std::this_thread::sleep_for(1ms);
      }
    }
  }

 private:
  std::vector<int> place_;
  Shape shape_;
  Oracles oracles_;
  std::string rendezvous_;
  std::vector<std::string> addresses_;
  std::chrono::nanoseconds timeout_ = 20s;
};

void require_ok(const Rank& rank) {
  if (!rank.failures().empty()) throw std::runtime_error(rank.failures());
}

// A rank that plays itself, whatever it was started as.
Rank player(int rank) {
  return Rank(Communicator::connect("join_test_" + std::to_string(::getpid()), 0, 1), rank);
}

// Runs pairs, judged by the oracle, until all ranks have run some together; before that somebody
// must have been away. `keeper` lets in who waits, the first time once at least so many do; each
// time it does something `then`.
void run_until_all_are_there(
    const Job& job, Buffer& buffer, int keeper, bool was_away = false,
    std::size_t least_waiting = 1, const std::function<void(int)>& then = [](int) {}) {
  Rank rank = player(buffer.rank());
  Party party(rank, job.oracles(), buffer);
  const Present all(job.num_ranks(), true);
  int together = 0;
  const auto start = std::chrono::steady_clock::now();
  while (together < kPairs) {
    rank.expect(std::chrono::steady_clock::now() - start < kPatience, "all are there in time");
    if (buffer.rank() == keeper) {
      const std::vector<int> waiting = buffer.waiting();
      for (const int each : waiting) {
        if (waiting.size() < least_waiting) break;
        const auto error = runtime::error_of([&] { buffer.unmask(each); });
        if (error && error->code() != ErrorCode::kOrder) throw Error(*error);  // it has gone again
        then(each);
      }
      if (waiting.size() >= least_waiting) least_waiting = 1;
    }
    const Present present = party.run(buffer);
    require_ok(rank);
    was_away = was_away || present != all;
    together = was_away && present == all ? together + 1 : 0;
  }
}

void run_until_killed(const Job& job, Buffer& buffer, std::chrono::microseconds delay) {
  Rank rank = player(buffer.rank());
  Party party(rank, job.oracles(), buffer);
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    ::raise(SIGKILL);
  }).detach();
  for (;;) static_cast<void>(party.run(buffer));
}

// One of three ranks that are there from the beginning, of whom rank 1 is killed.
void begin(const Job& job, int rank) {
  const Communicator communicator = job.connect(rank);
  Buffer buffer(communicator, job.options(rank));
  if (rank == 1) run_until_killed(job, buffer, 0us);
  run_until_all_are_there(job, buffer, 0);
}

// Ranks are killed at some moment, all at about the same; the process behind the last rank is the
// first victim's successor, and so on.
void expect_replacements(int num_ranks, const std::vector<int>& victims, std::vector<int> place,
                         std::chrono::microseconds delay, std::size_t least_waiting = 1,
                         int slow_process = -1) {
  const Job job(num_ranks, std::move(place));
  int keeper = 0;
  while (std::ranges::find(victims, keeper) != victims.end()) ++keeper;
  job.run(victims, [&](int process) {
    if (process < num_ranks) {
      const Communicator communicator = job.connect(process);
      Buffer buffer(communicator, job.options(process));
      if (std::ranges::find(victims, process) != victims.end()) {
        run_until_killed(job, buffer, delay);
      }
      run_until_all_are_there(job, buffer, keeper, false, least_waiting);
    } else {
      Slow slow(Point::kAdopting);
      Buffer buffer = job.join(process, victims[process - num_ranks], keeper,
                               process == slow_process ? &slow : nullptr);
      run_until_all_are_there(job, buffer, keeper, true);
    }
  });
}

// Rank 3 shares memory with rank 0, its successor is on a host of its own; then the other way
// round, and beside rank 0 again, with which it shares none.
TEST(NetJoin, WhoSharedMemoryWithOthersIsReplacedFromAnywhere) {
  std::mt19937 random(3);
  for (const int host : {3, 0}) {
    const std::chrono::microseconds delay(random() % 20'000);
    expect_replacements(4, {3}, {0, 1, 2, 0, host}, delay);
  }
  expect_replacements(4, {1}, {0, 1, 2, 0, 0}, 5ms);
}

// At whose address the others met.
TEST(NetJoin, Rank0IsReplaced) { expect_replacements(3, {0}, {0, 1, 2, 3}, 3ms); }

// Who comes at the same time hears of each other from those who are there; let in as they come, or
// both for the same operation.
TEST(NetJoin, TwoRanksAreReplacedAtOnce) {
  for (const auto delay : {0ms, 7ms, 30ms}) {
    for (const std::size_t least_waiting : {1, 2}) {
      expect_replacements(5, {2, 3}, {0, 1, 2, 0, 1, 3, 2}, delay, least_waiting);
    }
  }
}

// What the one sends before the other has taken note of it would be lost.
TEST(NetJoin, OfTwoThatAreLetInAtOnceOneMayLearnSoLate) {
  for (const int slow_process : {5, 6}) {
    expect_replacements(5, {2, 3}, {0, 1, 2, 0, 1, 3, 2}, 3ms, 2, slow_process);
  }
}

// Two are let in for the same operation, by one decision after the other. The first has heard of
// its own alone when it begins to wait there, and of the other when all it waited for is done; the
// second has heard of none when the first goes on.
TEST(NetJoin, OfTwoThatAreLetInTheFirstLearnsOfTheOtherAsItBegins) {
  const Job job(5, {0, 1, 2, 0, 1, 3, 2});
  struct Flags {
    std::atomic<bool> first_waits, others_went_on, first_sent;
  };
  const Shared<Flags> flags;
  job.run({2, 3}, [&](int process) {
    if (process >= 5) {
      Meeting meeting(process == 5 ? std::vector<Meeting::Stop>{{.at = Point::kWaiting,
                                                                 .is_here = &flags->first_waits,
                                                                 .awaited = &flags->others_went_on},
                                                                {.at = Point::kHeadersSent,
                                                                 .is_here = &flags->first_sent}}
                                   : std::vector<Meeting::Stop>{
                                         {.at = Point::kKnocked, .awaited = &flags->first_sent}});
      Buffer buffer = job.join(process, process - 3, 0, &meeting);
      run_until_all_are_there(job, buffer, 0, true);
      return;
    }
    const Communicator communicator = job.connect(process);
    Meeting keeper({});
    Buffer buffer(std::make_shared<BufferState>(communicator, job.options(process),
                                                process == 0 ? &keeper : nullptr));
    if (process == 2 || process == 3) run_until_killed(job, buffer, 0us);
    run_until_all_are_there(job, buffer, 0, false, 2, [&](int let_in) {
      if (let_in == 3) keeper.add({.at = Point::kFinished, .is_here = &flags->others_went_on});
      for (int i = 0; i < 2000 && !flags->first_waits; ++i) std::this_thread::sleep_for(1ms);
    });
  });
}

// One rank is left. Of two that come the second is told of the first at the door, and the first is
// not told of the second by the one that is there.
TEST(NetJoin, TwoThatComeToOneRankMeetEachOther) {
  const Job job(3, {0, 1, 2, 3, 1});
  const Shared<std::atomic<bool>> first_waits;
  job.run({1, 2}, [&](int process) {
    if (process >= 3) {
      Meeting meeting({{.at = Point::kKnocked, .is_here = &*first_waits}});
      while (process == 4 && !*first_waits) std::this_thread::sleep_for(1ms);
      Buffer buffer = job.join(process, process - 2, 0, &meeting);
      run_until_all_are_there(job, buffer, 0, true);
      return;
    }
    const Communicator communicator = job.connect(process);
    Buffer buffer(communicator, job.options(process));
    if (process == 1) run_until_killed(job, buffer, 0us);
    if (process == 2) {  // once it is decided without rank 1: two of three at once are too many
      Rank rank = player(2);
      Party party(rank, job.oracles(), buffer);
      while (party.run(buffer)[1]) {
      }
      // Rank 0 has begun what this one has ended, so by then knows that it is decided.
      static_cast<void>(party.run(buffer));
      ::raise(SIGKILL);
    }
    run_until_all_are_there(job, buffer, 0, false, 2);
  });
}

// Wherever the first that comes is killed, the next takes its place.
TEST(NetJoin, AProcessThatIsKilledWhileItJoinsIsReplacedItself) {
  for (const Point point : {Point::kTakingPlace, Point::kTookPlace, Point::kKnocking,
                            Point::kKnocked, Point::kBack, Point::kHeader, Point::kRowsCame}) {
    SCOPED_TRACE(static_cast<int>(point));
    const Job job(3, {0, 1, 2, 3, 1});
    const Shared<std::atomic<bool>> is_near;
    job.run({1, 3}, [&](int process) {
      if (process < 3) return begin(job, process);
      Death death(point, *is_near);
      while (process == 4 && !*is_near) std::this_thread::sleep_for(1ms);
      Buffer buffer = job.join(process, 1, 0, process == 3 ? &death : nullptr);
      run_until_all_are_there(job, buffer, 0, true);
    });
  }
}

// Of many that want to be one rank, one is; the others are killed if they get so far, or in the
// end.
TEST(NetJoin, OneOfManyTakesThePlace) {
  const Job job(3, {0, 1, 2, 3, 3, 1, 0});
  const Point points[] = {Point::kTookPlace, Point::kKnocked, Point::kBack};
  const Shared<std::atomic<bool>> is_near;
  job.run({1, 3, 4, 5}, [&](int process) {
    if (process < 3) return begin(job, process);
    std::optional<Death> death;
    if (process < 6) {
      death.emplace(points[process - 3], *is_near);
      std::thread([] {
        std::this_thread::sleep_for(5s);
        ::raise(SIGKILL);
      }).detach();
    }
    Buffer buffer = job.join(process, 1, process % 2 == 0 ? 0 : 2, death ? &*death : nullptr);
    run_until_all_are_there(job, buffer, 0, true);
  });
}

// A new start, before and after a process has come. What fails then is told to that process, which
// has still to look when the others have called recover().
TEST(NetJoin, AProcessThatJoinedRecoversWithTheOthers) {
  const Job job(3, {0, 1, 2, 3});
  job.run({1}, [&](int process) {
    const int index = process < 3 ? process : 1;
    std::optional<Communicator> communicator;
    Slow slow(Point::kHeadersSent);
    std::optional<Buffer> buffer;
    Rank rank = player(index);
    const auto fail_and_recover = [&] {
      Party party(rank, job.oracles(), *buffer);
      fail_together(rank, party, *buffer);
      static_cast<void>(buffer->recover());
      require_ok(rank);
    };
    if (process < 3) {
      communicator.emplace(job.connect(process));
      buffer.emplace(*communicator, job.options(process));
      fail_and_recover();
      if (process == 1) run_until_killed(job, *buffer, 0us);
    } else {
      buffer.emplace(job.join(process, index, 0, &slow));
    }
    run_until_all_are_there(job, *buffer, 0, process == 3);
    fail_and_recover();
    run_until_all_are_there(job, *buffer, 0, true);
  });
}

// The link of host 1 is down until the rank behind it gives up what it has. It is back by another
// connection; its process has not ended.
TEST(NetJoin, ARankBehindALinkThatWasDownComesBackAnew) {
  Job job(3, {0, 1, 2});
  job.set_timeout(2s);
  const Shared<std::atomic<bool>> gave_up;
  const Shared<Gathering> all_ready;
  job.run({}, [&](int process) {
    std::optional<Communicator> communicator(job.connect(process));
    std::optional<Buffer> buffer(std::in_place, *communicator, job.options(process));
    all_ready->await(job.num_ranks());
    if (process != 1) {
      if (process == 0) {
        std::thread([&] {
          std::this_thread::sleep_for(50ms);
          hosts().set_link(1, false);
          while (!*gave_up) std::this_thread::sleep_for(1ms);
          hosts().set_link(1, true);
        }).detach();
      }
      run_until_all_are_there(job, *buffer, 0);
      return;
    }
    Rank rank = player(1);
    Party party(rank, job.oracles(), *buffer);
    const auto error = runtime::error_of([&] {
      for (;;) static_cast<void>(party.run(*buffer));
    });
    rank.expect(error && error->code() == ErrorCode::kTimeout, error ? error->what() : "nothing");
    require_ok(rank);
    *gave_up = true;
    buffer.reset();
    communicator.reset();
    buffer.emplace(job.join(process, 1, 0, nullptr));
    run_until_all_are_there(job, *buffer, 0, true);
  });
  hosts().set_link(1, true);
}

// Whoever reaches a door without the secret: it opens for those who have it all the same, and
// nothing is left of the others.
TEST(NetJoin, StrangersAtADoorAreSentAway) {
  const Job job(3, {0, 1, 2, 3});
  job.run({1}, [&](int process) {
    if (process < 3) return begin(job, process);
    const std::string& address = job.address(0);
    const std::size_t colon = address.rfind(':');
    std::mt19937 random(7);
    std::vector<int> connections;
    for (int i = 0; i < 100; ++i) {  // some say nothing, some anything
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
      to.sin_addr.s_addr = htonl(0x0a630001);  // host 0
      static_cast<void>(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to));
      connections.push_back(fd);
    }
    runtime::require_error(ErrorCode::kInvalidArgument, -1, {"rank 0", "another secret"}, [&] {
      Buffer::join_across_hosts(address, "a guess", 1, job.options(process));
    });
    for (const int fd : connections) ::close(fd);
    Buffer buffer = job.join(process, 1, 0, nullptr);
    run_until_all_are_there(job, buffer, 0, true);
  });
}

}  // namespace
}  // namespace tandem::test
