// GPU ranks that share no memory, as on several hosts: what they send goes over the network. First
// as processes, which are forked before this one touches the GPU and whose kernels take turns; then
// as threads, whose kernels run side by side, and which must not allocate meanwhile.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;

class CudaApart : public testing::Test {
 protected:
  static void launch(const char* how) { setenv("TANDEM_TEST_LAUNCH", how, 1); }
  void SetUp() override { launch("apart"); }
  void TearDown() override { launch("threads"); }
};

std::vector<Shape> shapes_of(int num_ranks) {
  std::vector<Shape> shapes;
  for (const Placement placement : {Placement::kPacked, Placement::kSlotted}) {
    for (const Layout layout : {Layout::kPadded, Layout::kPacked}) {
      for (const bool zero_copy : {false, true}) {
        Shape shape{.num_ranks = num_ranks,
                    .num_experts = 6,
                    .hidden = 1000,
                    .topk = 4,
                    .max_tokens = 16,
                    .seed = shapes.size() + 1};
        shape.placement = placement;
        shape.layout = layout;
        shape.zero_copy = zero_copy;
        shape.hook = placement == Placement::kSlotted && zero_copy;
        shape.format = layout == Layout::kPacked ? Format::kFp8 : Format::kBFloat16;
        shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

// Each way to run them, bit by bit what the oracle says, as over shared memory.
TEST_F(CudaApart, ProcessesExchangeOverTheNetwork) { run_in_turn(shapes_of(2)); }

// Ranks 0 and 1 share memory, rank 2 is elsewhere.
Communicator partly_apart(const Rank& together) {
  return Communicator::from_all_gather(together.index(), together.size(),
                                       [&](std::span<const std::byte> message) {
                                         return together.communicator().all_gather(message);
                                       },
                                       {.timeout = 20s, .share_memory = together.index() != 2});
}

// One operation uses both ways.
TEST_F(CudaApart, SharedMemoryAndNetworkServeOneOperation) {
  launch("processes");
  const std::vector<Shape> shapes = shapes_of(3);
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  run_ranks(3, [&](Rank& together) {
    Rank rank(partly_apart(together));
    Buffer buffer(rank.communicator(), options_for(shapes));
    for (const Scenario& scenario : scenarios) Exchange(rank, scenario, buffer).run(buffer);
    if (!rank.failures().empty()) together.fail(rank.failures());
  });
}

// One dispatch without a peer that does not come, and what it fails with.
ErrorInfo expect_to_miss(Rank& rank, int missing, ErrorCode code, Exchange& exchange,
                         Buffer& buffer) {
  const auto start = std::chrono::steady_clock::now();
  const std::string name = "rank " + std::to_string(missing);
  const auto dispatch = [&] {
    static_cast<void>(
        buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options()));
    rank.settle(buffer);
  };
  const ErrorInfo info = rank.expect_error(code, {name}, dispatch);
  rank.expect_equal(info.peer, missing, "peer");
  rank.expect(std::chrono::steady_clock::now() - start < 20s, "before the timeout");
  rank.expect_error(ErrorCode::kFailedBuffer, {name}, dispatch);
  return info;
}

TEST_F(CudaApart, ProcessThatIsKilledIsNamedByAllBeforeTheTimeout) {
  const Scenario scenario = make_scenario({.num_ranks = 3, .num_experts = 6, .topk = 3});
  run_ranks(3,
            [&](Rank& rank) {
              BufferOptions options = options_for(scenario.shape);
              options.timeout = 30s;
              Buffer buffer(rank.communicator(), options);
              Exchange exchange(rank, scenario, buffer);
              exchange.run(buffer);
              rank.barrier();  // what it has sent has arrived
              if (rank.index() == kVictim) rank.die();
              expect_to_miss(rank, kVictim, ErrorCode::kPeerLost, exchange, buffer);
            },
            {.may_die = {kVictim}});
}

// Whoever has ended is left behind; the others go on, and with the right rows.
TEST_F(CudaApart, OthersRecoverWithoutAProcessThatWasKilled) {
  const Scenario all = make_scenario(entangled_three());
  const Scenario rest = without(all, {kVictim});
  run_ranks(3,
            [&](Rank& rank) {
              BufferOptions options = options_for(all.shape);
              options.timeout = 30s;
              Buffer buffer(rank.communicator(), options);
              Exchange exchange(rank, all, buffer);
              exchange.run(buffer);
              rank.barrier();
              if (rank.index() == kVictim) rank.die();
              rank.run_freely();
              expect_to_miss(rank, kVictim, ErrorCode::kPeerLost, exchange, buffer);
              rank.expect(buffer.recover() == std::vector<bool>{true, false, true}, "who is left");
              Exchange others(rank, rest, buffer);
              for (int pair = 0; pair < 4; ++pair) others.run(buffer);
              rank.expect(!others.result().handle.active()[kVictim], "the handle says so");
            },
            {.may_die = {kVictim}});
}

// In the very operation in which it is missed, by a rank of its own host and by one that is
// elsewhere.
TEST_F(CudaApart, OthersGoOnWithoutAProcessThatIsKilled) {
  launch("processes");
  const Scenario all = make_scenario(entangled_three());
  const Scenario rest = without(all, {kVictim});
  run_ranks(3,
            [&](Rank& together) {
              Rank rank(partly_apart(together));
              rank.run_freely();
              BufferOptions options = options_for(all.shape);
              options.on_timeout = OnTimeout::kMask;
              options.timeout = 20s;
              Buffer buffer(rank.communicator(), options);
              Exchange exchange(rank, all, buffer);
              Exchange others(rank, rest, buffer);
              exchange.run(buffer);
              rank.barrier();
              if (rank.index() == kVictim) rank.die();
              const auto start = std::chrono::steady_clock::now();
              for (int pair = 0; pair < 4; ++pair) others.run(buffer);
              rank.expect(std::chrono::steady_clock::now() - start < 15s, "before the timeout");
              const auto loss = buffer.last_loss();
              rank.expect(loss && loss->code() == ErrorCode::kPeerLost, "there is a reason");
              if (!rank.failures().empty()) together.fail(rank.failures());
            },
            {.may_die = {kVictim}});
}

// Ranks 0 and 1 share memory, rank 2 is elsewhere. Each is masked by a rank that is here and by one
// that is there, and let in; then all start anew.
TEST_F(CudaApart, RanksHereAndThereAreMaskedAndLetIn) {
  launch("processes");
  const Scenario all = make_scenario(entangled_three());
  const Scenario without_one[] = {without(all, {0}), without(all, {1}), without(all, {2})};
  run_ranks(3, [&](Rank& together) {
    Rank rank(partly_apart(together));
    rank.run_freely();
    Buffer buffer(rank.communicator(), options_for(all.shape));
    Exchange exchange(rank, all, buffer);
    for (const auto& [masked, masking] : {std::pair{1, 0}, {1, 2}, {2, 0}, {2, 1}, {0, 2}}) {
      const std::string what =
          std::to_string(masked) + " masked by " + std::to_string(masking) + ": ";
      if (rank.index() == masking) buffer.mask(masked);
      rank.barrier();
      for (int pair = 0; pair < 2; ++pair) exchange.run(buffer);
      if (rank.index() == masked) {
        rank.expect_error(ErrorCode::kMasked, {}, [&] { exchange.dispatch(buffer); });
        rank.expect(buffer.recover()[masked], what + "it is back");
      } else {
        Exchange rest(rank, without_one[masked], buffer);
        for (int pair = 0; pair < 2; ++pair) rest.run(buffer);
        if (rank.index() == masking) {
          while (buffer.waiting().empty()) std::this_thread::sleep_for(1ms);
          buffer.unmask(masked);
        }
        rest.run(buffer);
        rest.run(buffer);
      }
      for (int pair = 0; pair < 2; ++pair) exchange.run(buffer);
      rank.expect(exchange.result().handle.active()[masked], what + "the handle says so");
      rank.barrier();
      const std::vector<bool> active = buffer.recover();
      rank.expect(active == std::vector<bool>(3, true), what + "all start anew");
      exchange.run(buffer);
      rank.barrier();
    }
    if (!rank.failures().empty()) together.fail(rank.failures());
  });
}

// Only rank 0 is impatient.
TEST_F(CudaApart, WhatOneRankNoticesIsToldToAll) {
  const Scenario scenario = make_scenario({.num_ranks = 3, .num_experts = 6, .topk = 3});
  run_ranks(3, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.timeout = rank.index() == 0 ? 1s : 30s;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    rank.barrier();
    if (rank.index() != 1) expect_to_miss(rank, 1, ErrorCode::kTimeout, exchange, buffer);
    rank.barrier();
  });
}

TEST_F(CudaApart, MismatchIsTold) {
  const Scenario scenario = make_scenario({.num_ranks = 2, .max_tokens = 8});
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.max_tokens = 9;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    DispatchOptions odd = exchange.dispatch_options();
    odd.max_tokens = 8 + rank.index();
    rank.fence();
    rank.expect_error(ErrorCode::kMismatch, {"max_tokens"}, [&] {
      static_cast<void>(buffer.dispatch(exchange.x(), exchange.topk_idx(), odd));
      rank.settle(buffer);
    });
    rank.fence();
  });
}

// A kernel that waits for a late peer is waited for by calls of its process, on whose copies it
// depends.
void wait_for_the_device_meanwhile(const std::function<void()>& wait) {
  const Scenario scenario = make_scenario({.num_ranks = 2, .num_experts = 6, .topk = 3});
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.timeout = 5s;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
    rank.barrier();
    if (rank.index() == 1) std::this_thread::sleep_for(500ms);
    static_cast<void>(
        buffer.dispatch(exchange.x(), exchange.topk_idx(), exchange.dispatch_options()));
    wait();
    rank.settle(buffer);
    rank.barrier();
  });
}

TEST_F(CudaApart, DeviceMayBeSynchronised) {
  wait_for_the_device_meanwhile(
      [] { require_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
}

TEST_F(CudaApart, MemoryMayBeTaken) {
  void* memory = nullptr;
  wait_for_the_device_meanwhile([&] { require_cuda(cudaMalloc(&memory, 4 << 20), "cudaMalloc"); });
}

// Freeing memory waits for the kernel and holds what copies need. The library waits first, and
// holds nothing: without that this ended with the timeout.
TEST_F(CudaApart, ArraysMayGo) {
  wait_for_the_device_meanwhile(
      [] { static_cast<void>(Array(Backend::kCuda, DType::kInt32, {1 << 20})); });
}

// Kernels alone ask for what is to be sent: a replayed graph needs no call. As threads.
TEST_F(CudaApart, GraphsAreReplayed) {
  launch("apart-threads");
  constexpr int kRounds = 30;
  for (const bool slotted : {false, true}) {
    Shape shape{.num_ranks = 2, .num_experts = 8, .hidden = 512, .topk = 4, .max_tokens = 8};
    shape.placement = slotted ? Placement::kSlotted : Placement::kPacked;
    const Scenario scenario = make_scenario(shape);
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      DispatchResult result;
      const Graph graph(stream, [&] {
        for (int i = 0; i < 3; ++i) result = pair.run(stream, i % 2 == 0);
      });
      for (int round = 0; round < kRounds && rank.failures().empty(); ++round) {
        pair.spoil();
        rank.fence();
        graph.launch(stream);
        stream.synchronise();
        rank.fence();
        buffer.check();
        const std::string report = pair.compare(result);
        rank.expect(report.empty(), report);
        rank.fence();
      }
    });
  }
}

}  // namespace
}  // namespace tandem::test
