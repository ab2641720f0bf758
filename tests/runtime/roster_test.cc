// What ranks tell each other of a view beside the board: one at a time, and never by an older view
// after a newer one; masks and new starts as a backend gets them whose operations lag behind the
// host.
#include "runtime/roster.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/buffer_state.h"
#include "tandem/communicator.h"

namespace tandem::runtime {
namespace {

using namespace std::chrono_literals;

constexpr Epoch kFirst = 7;
constexpr Leads kLeads{.mask = 4, .unmask = 6};

// A rank's roster and what belongs to it.
struct End {
  BufferPlan plan;
  layout::Doorbell doorbell{};
  const Membership* membership;  // the roster's
  Roster roster;

  End(const Communicator& communicator, std::chrono::nanoseconds timeout)
      : End(communicator, timeout,
            std::make_unique<Membership>(*communicator.bootstrap(), communicator.size(), kFirst)) {}

 private:
  End(const Communicator& communicator, std::chrono::nanoseconds timeout,
      std::unique_ptr<Membership> made)
      : plan(make_plan({.num_experts = communicator.size(),
                        .max_tokens = 1,
                        .max_hidden = 16,
                        .max_topk = 1,
                        .timeout = timeout,
                        .first_epoch = kFirst},
                       communicator.rank(), communicator.size())),
        membership(made.get()),
        roster(plan, Waiter(doorbell, timeout, communicator.size()), nullptr, std::move(made),
               {.ring = [] {},
                .forget = [](std::span<const int>) {},
                .meet = [](int) { return false; }},
               kLeads) {
    communicator.barrier();
  }
};

Context before(Epoch epoch) { return {.operation = Operation::kNone, .epoch = epoch}; }

// Both mask another rank; whoever writes writes what is newest, and the number of views written
// never goes down.
TEST(Roster, WritesByTheNewestViewOneAtATime) {
  constexpr int kRanks = 4;
  std::atomic<std::uint32_t> written{0};
  run_threads(kRanks, [&](const Communicator& communicator) {
    End end(communicator, 20s);
    if (communicator.rank() < 2) {
      EXPECT_TRUE(end.roster.mask(communicator.rank() + 2, before(kFirst)));
      end.roster.write_view(before(kFirst), [&] {
        const std::uint32_t generation = end.roster.view().generation;
        EXPECT_LE(written.load(), generation);
        written = generation;
      });
    }
    communicator.barrier();
    EXPECT_EQ(written, kFirstGeneration + 2);
    communicator.barrier();
  });
}

// A rank that has a view decided while another writes by the one before waits for it.
TEST(Roster, WaitsForWhoWritesByAnOlderView) {
  std::atomic<bool> is_writing{false};
  std::atomic<bool> has_written{false};
  run_threads(3, [&](const Communicator& communicator) {
    End end(communicator, 20s);
    if (communicator.rank() == 0) {
      end.roster.write_view(before(kFirst), [&] {
        is_writing = true;
        while (!end.roster.round()) std::this_thread::yield();  // rank 1 has decided
        std::this_thread::sleep_for(20ms);
        has_written = true;
      });
    } else if (communicator.rank() == 1) {
      while (!is_writing) std::this_thread::yield();
      end.roster.fail(Error(ErrorCode::kTimeout, "somebody is late"));
      end.roster.write_view(before(kFirst), [&] { EXPECT_TRUE(has_written); });
    }
    communicator.barrier();
  });
}

TEST(Roster, SaysWhoStoppedWhileItWrote) {
  run_threads(2, [&](const Communicator& communicator) {
    End end(communicator, 50ms);
    const auto write = [&] {
      communicator.barrier();
      communicator.barrier();
    };
    if (communicator.rank() == 0) {
      end.roster.write_view(before(kFirst), write);
    } else {
      communicator.barrier();
      try {
        end.roster.write_view(before(kFirst), [] { ADD_FAILURE() << "both wrote"; });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTimeout);
        EXPECT_EQ(error.peer(), 0);
      }
      communicator.barrier();
    }
    communicator.barrier();
  });
}

// A change is decided for an operation so far ahead that nobody can have begun it.
TEST(Roster, ChangesHoldFromOperationsAhead) {
  run_threads(2, [&](const Communicator& communicator) {
    End end(communicator, 20s);
    if (communicator.rank() == 0) {
      EXPECT_TRUE(end.roster.mask(1, before(20)));
      EXPECT_FALSE(end.roster.mask(1, before(21)));
      EXPECT_FALSE(end.roster.view().active[1]);
      EXPECT_EQ(end.roster.view().from[1], 24U);
      communicator.barrier();
      while (!end.roster.waits(1)) std::this_thread::yield();
      EXPECT_TRUE(end.roster.unmask(1, before(30)));
      EXPECT_EQ(end.roster.view().from[1], 36U);
    } else {
      communicator.barrier();
      const Roster::Start start = end.roster.recover(25);
      EXPECT_TRUE(start.let_in);
      EXPECT_EQ(start.view.from[1], 36U);
    }
    communicator.barrier();
  });
}

// Whoever does not come is left behind, in the past of all; the others start together.
TEST(Roster, StartsTogetherWithoutTheMissing) {
  run_threads(3, [&](const Communicator& communicator) {
    // Rank 0 alone is impatient, once rank 1 is there.
    End end(communicator, communicator.rank() == 0 ? 1s : 20s);
    while (communicator.rank() == 0 && end.membership->ask(1, Status::kRecovering) == 0) {
      std::this_thread::yield();
    }
    if (communicator.rank() != 2) {
      const Roster::Start start = end.roster.recover(40U + communicator.rank());
      EXPECT_FALSE(start.let_in);
      EXPECT_EQ(start.view.from[communicator.rank()], 43U);
      EXPECT_FALSE(start.view.active[2]);
      // Before whatever it may have come to, yet near it: epochs are compared by their distance.
      EXPECT_TRUE(start.view.from[2] == 32U || start.view.from[2] == 33U);
    }
    communicator.barrier();
  });
}

// What a rank noted in an operation that failed is not to be read later.
TEST(Roster, WhoIsBackWaitsForNobody) {
  run_threads(2, [](const Communicator& communicator) {
    End end(communicator, 20s);
    const int other[] = {1 - communicator.rank()};
    end.roster.tell_waiting_for(before(kFirst), other[0]);
    communicator.barrier();
    EXPECT_TRUE(end.roster.not_waiting(other).empty());
    communicator.barrier();
    static_cast<void>(end.roster.recover(kFirst + 1));
    communicator.barrier();
    EXPECT_EQ(end.roster.not_waiting(other).size(), 1U);
    communicator.barrier();
  });
}

// Where blocks are mapped before their ranks are let in: by all of those who take part.
TEST(Roster, RankThatWaitsHasBeenMetOnceAllWhoTakePartSaySo) {
  constexpr int kNewcomer = 2;
  std::atomic<int> num_met{0};
  run_threads(3, [&](const Communicator& communicator) {
    End end(communicator, 20s);
    if (communicator.rank() == 0) {
      EXPECT_TRUE(end.roster.mask(kNewcomer, before(kFirst)));
    }
    communicator.barrier();
    if (communicator.rank() == kNewcomer) {
      EXPECT_TRUE(end.roster.recover(kFirst).let_in);
      return;
    }
    end.roster.look(before(kFirst));
    while (!end.roster.waits(kNewcomer)) std::this_thread::yield();
    while (num_met != communicator.rank()) std::this_thread::yield();  // one after the other
    EXPECT_FALSE(end.roster.has_been_met(kNewcomer));
    end.roster.meet_waiting();
    EXPECT_EQ(end.roster.has_been_met(kNewcomer), communicator.rank() == 1);
    ++num_met;
    while (num_met != 2) std::this_thread::yield();
    EXPECT_TRUE(end.roster.has_been_met(kNewcomer));
    if (communicator.rank() == 0) {
      EXPECT_TRUE(end.roster.unmask(kNewcomer, before(kFirst)));
    }
  });
}

}  // namespace
}  // namespace tandem::runtime
