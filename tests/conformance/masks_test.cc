// Ranks that are masked, by a call or because they miss the timeout: the others go on without them,
// all alike and in the same step; a late rank learns it before it does harm; and it comes back.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <thread>

#include "support/compare.h"
#include "support/exchange.h"
#include "support/party.h"
#include "support/shared.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

constexpr int kVictim = 1;
// Where somebody is missed. The others must not be that late, however busy the machine is.
constexpr std::chrono::nanoseconds kLimit = 1s;

// Every rank needs every other, in every way that rows can travel.
std::vector<Shape> entangled_shapes() {
  Shape shape{.num_ranks = 3,
              .num_experts = 7,
              .hidden = 72,
              .topk = 5,
              .max_tokens = 9,
              .tokens = {9, 4, 6},
              .routing = Routing::kFull};
  std::vector<Shape> shapes{shape};
  shape.layout = Layout::kPacked;
  shape.row_alignment = 4;
  shape.format = Format::kFp8;
  shape.zero_copy = true;
  shapes.push_back(shape);
  shape.placement = Placement::kSlotted;
  shapes.push_back(shape);
  shape.layout = Layout::kPadded;
  shape.row_alignment = 1;
  shape.format = Format::kFp8Ue8m0;
  shape.hook = true;
  shapes.push_back(shape);
  shape.format = Format::kBFloat16;
  shape.zero_copy = false;
  shapes.push_back(shape);
  shape.partial_sums = backend_under_test() == Backend::kCpu;
  shapes.push_back(shape);
  return shapes;
}

// May a rank destroy what it has while others wait for it? Not threads of one process on a GPU,
// where memory is freed when nothing is at work.
bool may_leave() { return backend_under_test() == Backend::kCpu || ranks_are_processes(); }

BufferOptions masking(const Shape& shape, std::chrono::nanoseconds timeout = 20s) {
  BufferOptions options = options_for(shape);
  options.on_timeout = OnTimeout::kMask;
  options.timeout = with_patience(timeout);
  return options;
}

// One problem with all ranks and without the victim.
struct Cases {
  Scenario all;
  Scenario rest;
  explicit Cases(const Shape& shape) : all(make_scenario(shape)), rest(without(all, {kVictim})) {}
};

// A rank's tensors for both.
struct Exchanges {
  Exchange all;
  Exchange rest;
  Exchanges(Rank& rank, const Cases& cases, const Buffer& buffer)
      : all(rank, cases.all, buffer), rest(rank, cases.rest, buffer) {
    rank.run_freely();
    rank.barrier();
  }

  // A pair of operations, judged by who took part according to its handle. Was the victim there?
  bool run(Buffer& buffer) {
    all.dispatch(buffer);
    all.finish_dispatch();
    const bool was_there = all.result().handle.active()[kVictim];
    Exchange& fitting = was_there ? all : rest;
    fitting.result() = all.result();
    fitting.check_received();
    fitting.provide_outputs(buffer);
    fitting.combine(buffer);
    fitting.finish_combine();
    fitting.check_combined();
    return was_there;
  }
};

// On GPUs a mask holds from the fifth operation on: until then all take part.
void run_until_the_mask_holds(Rank& rank, Exchanges& exchanges, Buffer& buffer) {
  const int pairs = backend_under_test() == Backend::kCuda ? 2 : 0;
  for (int pair = 0; pair < pairs; ++pair) {
    rank.expect(exchanges.run(buffer), "all take part until the mask holds");
  }
}

void expect_masked(Rank& rank, Exchange& exchange, Buffer& buffer) {
  rank.expect_error(ErrorCode::kMasked, {"rank " + std::to_string(kVictim), "has been masked"},
                    [&] { exchange.dispatch(buffer); });
  rank.expect_error(ErrorCode::kFailedBuffer, {"has been masked"},
                    [&] { exchange.dispatch(buffer); });
}

// The victim recovers; rank 0 lets it in while all run operations; from one operation on, the same
// for all, it is there. `run`: a pair; was the victim in it?
void expect_return(Rank& rank, Buffer& buffer, const std::function<bool()>& run) {
  constexpr int kPairs = 3;
  if (rank.index() == kVictim) {
    const std::vector<bool> active = buffer.recover();
    rank.expect(active[0] && active[kVictim], "the victim is back");
    for (int pair = 0; pair < kPairs; ++pair) rank.expect(run(), "it is there");
    return;
  }
  int pairs_with_it = 0;
  for (const auto start = std::chrono::steady_clock::now();
       pairs_with_it < kPairs && std::chrono::steady_clock::now() - start < 20s;) {
    if (rank.index() == 0 && !buffer.active()[kVictim]) {
      try {
        buffer.unmask(kVictim);
      } catch (const Error& error) {
        rank.expect(error.code() == ErrorCode::kOrder, error.what());  // it is not there yet
      }
    }
    pairs_with_it += run() ? 1 : 0;
  }
  rank.expect_equal(pairs_with_it, kPairs, "pairs with the victim");
}

TEST(Masks, MaskedRankTakesNoPartUntilItIsLetInAgain) {
  for (const Shape& shape : entangled_shapes()) {
    const Cases cases(shape);
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      BufferOptions options = masking(shape);
      options.first_epoch = 0xfffffff6U;  // the wrap falls into the middle
      Buffer buffer(rank.communicator(), options);
      Exchanges exchanges(rank, cases, buffer);
      exchanges.all.run(buffer);
      rank.barrier();
      if (rank.index() == 0) buffer.mask(kVictim);
      rank.barrier();
      run_until_the_mask_holds(rank, exchanges, buffer);
      if (rank.index() == kVictim) {
        expect_masked(rank, exchanges.all, buffer);
      } else {
        for (int pair = 0; pair < 3; ++pair) {
          rank.expect(!exchanges.run(buffer), "the victim takes no part");
        }
        if (rank.index() == 0) {
          rank.expect(!buffer.active()[kVictim], "the victim is not active");
          rank.expect(buffer.last_loss().has_value(), "there is a reason");
        }
      }
      expect_return(rank, buffer, [&] { return exchanges.run(buffer); });
      rank.barrier();
    });
  }
}

// The survivors get the right result in the very step in which they miss the victim, and know.
TEST(Masks, RankThatNeverComesIsMaskedInThatStep) {
  for (const Shape& shape : entangled_shapes()) {
    const Cases cases(shape);
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), masking(shape, kLimit));
      Exchanges exchanges(rank, cases, buffer);
      exchanges.all.run(buffer);
      rank.barrier();
      if (rank.index() != kVictim) {
        for (int pair = 0; pair < 3; ++pair) {
          rank.expect(!exchanges.run(buffer), "the victim takes no part");
        }
        const std::optional<Error> loss = buffer.last_loss();
        rank.expect(loss && loss->peer() == kVictim, "the loss names the victim");
        rank.expect(loss && loss->code() == ErrorCode::kTimeout, "and the timeout");
      }
      rank.barrier();
      if (rank.index() == kVictim) expect_masked(rank, exchanges.all, buffer);
      rank.barrier();
      expect_return(rank, buffer, [&] { return exchanges.run(buffer); });
      rank.barrier();  // or threads on a GPU would free memory while others wait
    });
  }
}

// Lost between dispatch and combine: what its experts would have given is left out, no weight is
// changed. Where the rows lie stays as dispatch put them.
TEST(Masks, RankThatMissesTheCombineContributesNothing) {
  for (const Shape& shape : entangled_shapes()) {
    const Scenario scenario = make_scenario(shape);
    Scenario lost = scenario;
    for (reference::RankInput& input : lost.problem.ranks) {
      for (std::size_t i = 0; i < input.topk_idx.size(); ++i) {
        const auto& experts = scenario.received[kVictim].experts;
        if (std::find(experts.begin(), experts.end(), input.topk_idx[i]) != experts.end()) {
          input.topk_weights[i] = 0;
        }
      }
    }
    lost.out = reference::combine(lost.problem, lost.y, shape.combine_dtype);
    lost.problem = scenario.problem;
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), masking(shape, kLimit));
      Exchange exchange(rank, lost, buffer);
      exchange.dispatch(buffer);
      exchange.finish_dispatch();
      exchange.check_received();
      rank.barrier();
      rank.run_freely();
      if (rank.index() != kVictim) {
        exchange.provide_outputs(buffer);
        exchange.combine(buffer);
        exchange.finish_combine();
        exchange.check_combined();
        rank.expect(!exchange.result().handle.active()[kVictim], "the handle says so");
      }
      rank.barrier();
    });
  }
}

// The send phase of a hook has happened, and the receive phase does not: the rows are there, the
// rank is missed two operations later.
TEST(Masks, RankThatStopsReceivingIsMaskedWhenItIsInTheWay) {
  Shape shape = entangled_shapes().back();
  const Cases cases(shape);
  run_ranks(shape.num_ranks, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), masking(shape, kLimit));
    Exchanges exchanges(rank, cases, buffer);
    if (rank.index() == kVictim) {
      exchanges.all.dispatch(buffer);
      rank.barrier();
      rank.expect_error(ErrorCode::kMasked, {"has been masked"},
                        [&] { exchanges.all.finish_dispatch(); });
    } else {
      rank.expect(exchanges.all.result().handle ? false : true, "nothing yet");
      exchanges.all.dispatch(buffer);
      exchanges.all.finish_dispatch();
      exchanges.all.check_received();
      for (int pair = 0; pair < 3; ++pair) {
        rank.expect(!exchanges.run(buffer), "the victim takes no part");
      }
      rank.barrier();
    }
  });
}

// An impatient rank misses two: one that is late, and one that waits for that one, but for longer.
// Only the late one is masked, in the combine of the one and the dispatch of the other.
TEST(Masks, RankThatWaitsForTheLateOneIsSpared) {
  if (backend_under_test() != Backend::kCpu) return;
  for (const Shape& shape : entangled_shapes()) {
    Scenario scenario = make_scenario(shape);
    // The impatient rank's tokens do without the late one, so that it ends the combine.
    const std::vector<int>& late = scenario.received[kVictim].experts;
    for (std::int64_t& expert : scenario.problem.ranks[2].topk_idx) {
      if (std::find(late.begin(), late.end(), expert) != late.end()) expert = -1;
    }
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), masking(shape, rank.index() == 2 ? kLimit : 20s));
      Exchange exchange(rank, scenario, buffer);
      rank.barrier();
      exchange.dispatch(buffer);
      exchange.finish_dispatch();
      rank.barrier();
      if (rank.index() != kVictim) {
        exchange.provide_outputs(buffer);
        exchange.combine(buffer);
        exchange.finish_combine();
        exchange.dispatch(buffer);
        exchange.finish_dispatch();
        rank.expect(exchange.result().handle.active() == std::vector<bool>{true, false, true},
                    "only the victim is masked");
      }
      rank.barrier();
    });
  }
}

// One rank waits for another, which lets the victim in before it comes itself.
TEST(Masks, RankIsStillWaitedForWhenAnotherIsLetInMeanwhile) {
  for (const Shape& shape : entangled_shapes()) {
    const Cases cases(shape);
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), masking(shape));
      Exchanges exchanges(rank, cases, buffer);
      if (rank.index() == 0) buffer.mask(kVictim);
      rank.barrier();
      run_until_the_mask_holds(rank, exchanges, buffer);
      if (rank.index() == kVictim) {
        expect_masked(rank, exchanges.all, buffer);
        static_cast<void>(buffer.recover());
      } else {
        rank.expect(!exchanges.run(buffer), "the victim takes no part");
      }
      if (rank.index() == 2) {
        while (buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(10ms);  // rank 0 has begun, and waits
        buffer.unmask(kVictim);
        std::this_thread::sleep_for(10ms);
      }
      int pairs_with_it = 0;
      while (pairs_with_it < 2) pairs_with_it += exchanges.run(buffer) ? 1 : 0;
      rank.barrier();
    });
  }
}

TEST(Masks, TokenWhoseExpertsAreAllMaskedGivesZeros) {
  const Shape shape{.num_ranks = 2, .num_experts = 2, .topk = 1, .routing = Routing::kFull};
  const Cases cases(shape);
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), masking(shape));
    Exchanges exchanges(rank, cases, buffer);
    if (rank.index() != kVictim) buffer.mask(kVictim);
    rank.barrier();
    run_until_the_mask_holds(rank, exchanges, buffer);
    if (rank.index() == kVictim) return rank.barrier();
    rank.expect(!exchanges.run(buffer), "alone");
    const auto out = download_as<std::uint16_t>(exchanges.rest.out(), rank.stream());
    const auto& idx = cases.all.problem.ranks[0].topk_idx;
    int zeros = 0;
    for (std::size_t token = 0; token < idx.size(); ++token) {
      if (idx[token] != 1) continue;
      ++zeros;
      for (int channel = 0; channel < shape.hidden; ++channel) {
        rank.expect_equal(out[token * shape.hidden + channel], 0, "channel of a lost token");
      }
    }
    rank.expect(zeros > 0, "some token was lost");
    rank.barrier();
  });
}

TEST(Masks, MaskingIsRefusedWhereItMakesNoSense) {
  const Shape shape{.num_ranks = 2};
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), masking(shape));
    rank.expect_error(ErrorCode::kInvalidArgument, {"cannot mask itself"},
                      [&] { buffer.mask(rank.index()); });
    rank.expect_error(ErrorCode::kInvalidArgument, {"rank is 2", "[0, 2)"},
                      [&] { buffer.mask(2); });
    rank.expect_error(ErrorCode::kInvalidArgument, {"rank is -1"}, [&] { buffer.unmask(-1); });
    buffer.unmask(1 - rank.index());  // is active: nothing to do
    rank.barrier();
    if (rank.index() == 0) {
      buffer.mask(1);
      buffer.mask(1);
      rank.expect_error(ErrorCode::kOrder, {"rank 1", "recover()"}, [&] { buffer.unmask(1); });
    }
    rank.barrier();
    rank.expect_equal(static_cast<bool>(buffer.active()[1]), rank.index() != 0,
                      "known to those who have looked");
  });
}

// Whatever was seen by whom when the victim vanished, the others agree: all of them finish the
// step, and the next ones are right. Delays make the moment differ between ranks.
TEST(Masks, SurvivorsAgreeWhereverTheVictimStopped) {
  // Where it leaves nobody has to wait for a timeout, nor is to miss anybody else by it.
  const std::chrono::nanoseconds timeout = may_leave() ? 20s : kLimit;
  for (const Shape& shape : entangled_shapes()) {
    const Oracles oracles(shape);
    for (int pairs_of_victim = 0; pairs_of_victim < 3; ++pairs_of_victim) {
      run_ranks(shape.num_ranks, [&](Rank& rank) {
        Buffer buffer(rank.communicator(), masking(shape, timeout));
        Party party(rank, oracles, buffer);
        for (const auto& lost : {std::vector<int>{}, {kVictim}}) {  // or threads would allocate
          static_cast<void>(party.exchange(all_but(shape.num_ranks, lost)));
        }
        rank.barrier();
        if (rank.index() == kVictim) {
          for (int pair = 0; pair < pairs_of_victim; ++pair) party.run(buffer);
          if (!may_leave()) rank.barrier();
          return;  // and destroys its buffer
        }
        for (int pair = 0; pair < pairs_of_victim + 3; ++pair) {
          if (rank.index() == 2) std::this_thread::sleep_for(2ms);
          const bool is_there = pair < pairs_of_victim;
          const Present present = party.run(buffer, [&] {
            rank.expect_equal(party.handle().active()[kVictim], is_there, "was the victim there");
          });
          // In the last combine of the victim another survivor may be done, go on and miss it while
          // this one still adds up.
          const bool is_last = pair + 1 == pairs_of_victim;
          rank.expect(is_last || present[kVictim] == is_there, "the victim in a combine");
        }
        rank.expect(
            buffer.last_loss() && buffer.last_loss()->code() ==
                                      (may_leave() ? ErrorCode::kPeerLost : ErrorCode::kTimeout),
            "why the victim is not there");
        if (!may_leave()) rank.barrier();
      });
    }
  }
}

bool is_stopped(pid_t process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  std::getline(stat, line);
  return line.find(") T ") != std::string::npos;
}

// A process that is stopped does nothing, whatever others ask of it; but what it has launched on a
// GPU goes on.
TEST(Masks, StoppedProcessIsMaskedAndComesBack) {
  if (!ranks_are_processes()) return;
  struct Case {
    Shape shape;
    bool has_begun;  // a dispatch, when it is stopped: on a GPU, kernels that wait for the others
  };
  const Shape plain = entangled_shapes().front();
  std::vector<Case> cases{{plain, false}, {entangled_shapes()[3], true}};
  if (backend_under_test() == Backend::kCuda) cases.push_back({plain, true});
  for (const auto& [shape, has_begun] : cases) {
    const Oracles oracles(shape);
    const Shared<std::atomic<pid_t>> victim;
    run_ranks(shape.num_ranks, [&](Rank& rank) {
      if (rank.index() == kVictim) *victim = ::getpid();
      Buffer buffer(rank.communicator(), masking(shape, kLimit));
      Party party(rank, oracles, buffer);
      party.run(buffer);
      rank.barrier();
      if (rank.index() == kVictim) {
        Exchange& exchange = party.exchange();
        if (has_begun) exchange.dispatch(buffer);
        ::raise(SIGSTOP);
        rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked"}, [&] {
          if (!has_begun) exchange.dispatch(buffer);
          exchange.finish_dispatch();
          rank.settle(buffer);
        });
      } else {
        while (!is_stopped(*victim)) std::this_thread::sleep_for(1ms);
        for (int pair = 0; pair < 3; ++pair) {
          const Present present = party.run(buffer);
          rank.expect(!present[kVictim], "the victim takes no part");
        }
        const std::optional<Error> loss = buffer.last_loss();
        rank.expect(loss && loss->peer() == kVictim && loss->code() == ErrorCode::kTimeout,
                    "why the victim is not there");
        if (rank.index() == 0) ::kill(*victim, SIGCONT);
      }
      rank.barrier();
      expect_return(rank, buffer, [&]() -> bool { return party.run(buffer)[kVictim]; });
      rank.barrier();
    });
  }
}

// Who does not come within the timeout is left behind, and let in later.
TEST(Masks, RecoveryGoesOnWithoutThoseWhoDoNotCome) {
  const Cases cases(entangled_shapes().front());
  run_ranks(3, [&](Rank& rank) {
    rank.run_freely();
    BufferOptions options = options_for(cases.all.shape);
    options.timeout = with_patience(kLimit);
    Buffer buffer(rank.communicator(), options);
    {
      Exchange exchange(rank, cases.all, buffer);
      exchange.run(buffer);
    }
    rank.barrier();
    if (rank.index() != kVictim) {
      const std::vector<bool> active = buffer.recover();
      rank.expect(active[0] && !active[kVictim] && active[2], "who is active");
      Exchange exchange(rank, cases.rest, buffer);
      for (int pair = 0; pair < 3; ++pair) exchange.run(buffer);
    }
    rank.barrier();
    if (rank.index() == kVictim) {
      Exchange exchange(rank, cases.all, buffer);
      rank.expect_error(ErrorCode::kMasked, {"rank 1 has been masked"},
                        [&] { exchange.dispatch(buffer); });
      // Nobody lets it in for longer than it is willing to wait.
      rank.expect_error(ErrorCode::kTimeout, {"unmask(1)"},
                        [&] { static_cast<void>(buffer.recover()); });
    }
    rank.barrier();
  });
}

}  // namespace
}  // namespace tandem::test
