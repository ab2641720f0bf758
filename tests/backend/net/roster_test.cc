// Rosters of ranks that share no memory and whose changes hold operations ahead, as those of GPU
// ranks do: who has had a change decided, from when on it holds, and what is taken of whom.
#include "runtime/roster.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "runtime/buffer_state.h"
#include "tandem/communicator.h"

namespace tandem::runtime {
namespace {

using namespace std::chrono_literals;

constexpr Epoch kFirst = 7;
constexpr Leads kLeads{.mask = 4, .unmask = 4};
constexpr std::int64_t kBlockBytes = 4096;

Communicator set_apart(const Communicator& together) {
  return Communicator::from_all_gather(
      together.rank(), together.size(),
      [&](std::span<const std::byte> message) { return together.all_gather(message); },
      {.timeout = 20s, .share_memory = false});
}

// A rank's roster and what belongs to it.
struct End {
  Communicator apart;
  BufferPlan plan;
  std::shared_ptr<layout::Doorbell> doorbell = std::make_shared<layout::Doorbell>();
  std::shared_ptr<std::byte> block;
  std::unique_ptr<RemotePeers> remote;
  Roster roster;

  End(const Communicator& together, std::chrono::nanoseconds timeout)
      : apart(set_apart(together)),
        plan(make_plan({.num_experts = apart.size(),
                        .max_tokens = 1,
                        .max_hidden = 16,
                        .max_topk = 1,
                        .timeout = timeout,
                        .first_epoch = kFirst},
                       apart.rank(), apart.size())),
        block(reinterpret_cast<std::byte*>(new Word[kBlockBytes / sizeof(Word)]()),
              [](std::byte* words) { delete[] reinterpret_cast<Word*>(words); }),
        remote(apart.bootstrap()->network()->open({.block = block,
                                                   .block_bytes = kBlockBytes,
                                                   .control_bytes = kBlockBytes,
                                                   .wake =
                                                       [bell = doorbell] {
                                                         fence(std::memory_order_seq_cst);
                                                         ring(*bell);
                                                       }})),
        roster(plan, Waiter(*doorbell, timeout, apart.size()), remote.get(),
               std::make_unique<Membership>(*apart.bootstrap(), apart.size(), kFirst),
               {.ring = [] {},
                .forget = [](std::span<const int>) {},
                .meet = [](int) { return false; }},
               kLeads) {
    apart.barrier();
  }

  // What has come as the first word of the block.
  [[nodiscard]] Word word() const {
    return std::atomic_ref(*reinterpret_cast<Word*>(block.get())).load(std::memory_order_acquire);
  }
  void send_word(int peer, Word word) const {
    const RemotePeers::WordRun run{0, {&word, 1}};
    remote->send_words(peer, {&run, 1});
  }
  void look_until(const std::function<bool()>& done, Epoch next) {
    while (!done()) {
      roster.look({.operation = Operation::kNone, .epoch = next});
      std::this_thread::sleep_for(1ms);
    }
  }
};

Context before(Epoch epoch) { return {.operation = Operation::kNone, .epoch = epoch}; }

TEST(RosterAcrossHosts, ChangesHoldFromOperationsAhead) {
  run_threads(3, [&](const Communicator& together) {
    End end(together, 20s);
    const View& view = end.roster.view();
    if (together.rank() == 0) {
      EXPECT_TRUE(end.roster.mask(1, before(20)));
      EXPECT_FALSE(end.roster.mask(1, before(21))) << "nothing to do";
      EXPECT_EQ(view.from[1], 24U);
      together.barrier();
      // It takes part till then: what it sends is taken.
      while (end.word() == 0) std::this_thread::sleep_for(1ms);
      EXPECT_EQ(end.word(), layout::make_word(23, 5));
      together.barrier();
      while (!end.roster.waits(1)) std::this_thread::yield();
      EXPECT_TRUE(end.roster.unmask(1, before(30)));
      EXPECT_EQ(view.from[1], 34U);
    } else if (together.rank() == 2) {
      together.barrier();
      end.look_until([&] { return !end.roster.is_active(1); }, 21);
      EXPECT_EQ(view.from[1], 24U);
      EXPECT_FALSE(end.roster.mask(1, before(21))) << "it was another's doing";
      together.barrier();
      end.look_until([&] { return end.roster.is_active(1); }, 30);
      EXPECT_EQ(view.from[1], 34U);
    } else {
      together.barrier();
      end.look_until([&] { return !end.roster.is_active(1); }, 21);
      end.send_word(0, layout::make_word(23, 5));
      together.barrier();
      const Roster::Start start = end.roster.recover(25);
      EXPECT_TRUE(start.let_in);
      EXPECT_EQ(start.view.from[1], 34U);
    }
    together.barrier();
  });
}

// Nor is a rank lost to itself, which it is not connected to: it would leave its own block out.
TEST(RosterAcrossHosts, NobodyIsGoneAtFirst) {
  run_threads(3, [&](const Communicator& together) {
    const End end(together, 20s);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(end.roster.gone(rank), std::nullopt) << "to rank " << together.rank();
    }
    together.barrier();
  });
}

// Of several that want the same one has it decided, and so tells the others' kernels.
TEST(RosterAcrossHosts, OneOfThoseWhoAskHasChangedIt) {
  std::atomic<int> num_changes{0};
  run_threads(4, [&](const Communicator& together) {
    End end(together, 20s);
    if (together.rank() != 3) {
      if (end.roster.mask(3, before(20U + together.rank()))) ++num_changes;
      EXPECT_FALSE(end.roster.is_active(3));
    }
    together.barrier();
    EXPECT_EQ(num_changes, 1);
    together.barrier();
  });
}

TEST(RosterAcrossHosts, LeavesTheMissingBehindInThePastOfAll) {
  run_threads(3, [&](const Communicator& together) {
    End end(together, together.rank() == 2 ? 20s : 2s);
    if (together.rank() != 2) {
      const Roster::Start start = end.roster.recover(40U + together.rank());
      EXPECT_FALSE(start.let_in);
      EXPECT_EQ(start.view.from[together.rank()], 43U);
      EXPECT_FALSE(start.view.active[2]);
      // Yet near it: epochs are compared by their distance.
      EXPECT_TRUE(start.view.from[2] == 32U || start.view.from[2] == 33U);
    }
    together.barrier();
  });
}

// What a rank noted in an operation that failed is not told of it later.
TEST(RosterAcrossHosts, WhoIsBackWaitsForNobody) {
  run_threads(2, [](const Communicator& together) {
    End end(together, 20s);
    const int other[] = {1 - together.rank()};
    end.roster.tell_waiting_for(before(kFirst), other[0]);
    static_cast<void>(end.roster.recover(kFirst + 1));
    while (end.roster.not_waiting(other).empty()) std::this_thread::sleep_for(1ms);
    together.barrier();
  });
}

// A rank is lost; those who go on tell what they have of it, one of them has decided what all are
// to have, and it may come back once all go by that.
TEST(RosterAcrossHosts, SettleWhatALostRankHadAnnounced) {
  constexpr Epoch kMissed = 20;
  run_threads(3, [&](const Communicator& together) {
    End end(together, 20s);
    Envoy& envoy = end.roster.envoy();
    const View& view = end.roster.view();
    if (together.rank() == 1) {
      end.look_until([&] { return !end.roster.is_active(1); }, kMissed);
      EXPECT_TRUE(view.lost[1]);
      together.barrier();
      // It may have begun the operation that it was missed in, and the next; what comes of those,
      // and later, is another matter.
      end.send_word(0, layout::make_word(kMissed + 1, 5));
      EXPECT_TRUE(end.roster.recover(kMissed + 1).let_in);
      end.send_word(0, layout::make_word(40, 5));
      together.barrier();
      return;
    }
    const std::vector<int> lost{1};
    if (together.rank() == 0) {
      end.roster.mask(lost, {.info = {.code = ErrorCode::kTimeout, .epoch = kMissed, .peer = 1},
                             .message = "missed"});
    }
    end.look_until([&] { return !end.roster.is_active(1); }, kMissed);
    EXPECT_TRUE(view.lost[1]);
    EXPECT_EQ(view.from[1], kMissed + 1);
    together.barrier();
    const Envoy::Losses losses = envoy.losses();
    EXPECT_EQ(losses.number, view.number);
    EXPECT_EQ(losses.ranks, lost);
    EXPECT_FALSE(envoy.holdings(losses.number, end.roster.active()));
    envoy.tell_holdings(losses.number, {Word{100} + together.rank()});
    std::optional<std::vector<std::vector<Word>>> holdings;
    while (!(holdings = envoy.holdings(losses.number, end.roster.active()))) {
      std::this_thread::yield();
    }
    EXPECT_EQ(*holdings, (std::vector<std::vector<Word>>{{100}, {102}}));
    end.roster.settle({.kind = Change::Kind::kSettle, .ranks = lost, .words = {7, 8}});
    end.look_until([&] { return view.number != losses.number; }, kMissed);
    EXPECT_EQ(envoy.settlement().words, (std::vector<Word>{7, 8}));
    EXPECT_EQ(envoy.settlement().number, view.number);
    EXPECT_TRUE(envoy.losses().ranks.empty());
    EXPECT_TRUE(end.roster.last_loss()) << "the reason stands";
    EXPECT_FALSE(end.roster.all_have_settled());
    if (together.rank() == 2) end.roster.tell_settled(view.number);
    if (together.rank() == 0) {
      end.roster.tell_settled(view.number);
      while (!end.roster.all_have_settled() || !end.roster.waits(1)) std::this_thread::yield();
      EXPECT_TRUE(end.roster.unmask(1, before(30)));
      EXPECT_FALSE(view.lost[1]);
      while (end.word() == 0) std::this_thread::sleep_for(1ms);
      EXPECT_EQ(end.word(), layout::make_word(40, 5)) << "nothing of before";
    }
    together.barrier();
  });
}

// What is written by a view is written again by one that has come meanwhile.
TEST(RosterAcrossHosts, WritesAgainByADecisionThatHasComeWhileItWrote) {
  run_threads(3, [&](const Communicator& together) {
    End end(together, 20s);
    if (together.rank() == 0) {
      int num_written = 0;
      end.roster.write_view(before(20), [&] {
        if (++num_written > 1) return;
        EXPECT_TRUE(end.roster.is_active(2));
        together.barrier();  // rank 1 has it decided
        together.barrier();
        while (end.roster.newest().active[2]) std::this_thread::yield();
      });
      EXPECT_EQ(num_written, 2);
      EXPECT_FALSE(end.roster.is_active(2));
    } else {
      together.barrier();
      if (together.rank() == 1) {
        EXPECT_TRUE(end.roster.mask(2, before(20)));
      }
      together.barrier();
    }
    together.barrier();
  });
}

}  // namespace
}  // namespace tandem::runtime
