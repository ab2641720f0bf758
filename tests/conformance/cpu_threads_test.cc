// What only CPU ranks can show about threads: ranks that work with several, and several buffers
// used at once by threads of one rank.
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "support/exchange.h"

namespace tandem::test {
namespace {

std::vector<Shape> shapes_for_workers() {
  std::vector<Shape> shapes;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Shape shape{.num_ranks = 2, .num_experts = 5, .hidden = 300, .topk = 3, .max_tokens = 16};
    shape.tokens = {static_cast<int>(seed * 3 % 17), 16};
    shape.format = static_cast<Format>(seed % 6);
    shape.placement = seed % 2 == 0 ? Placement::kSlotted : Placement::kPacked;
    shape.zero_copy = seed % 3 == 0;
    shape.seed = seed;
    shapes.push_back(shape);
  }
  return shapes;
}

// Report: fixed numbers of threads or SMs. Any number works, more than tokens or experts too, and
// another one on each rank.
TEST(CpuThreads, AnyNumberOfThreadsWorks) {
  const std::vector<Shape> shapes = shapes_for_workers();
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  for (int threads = 1; threads <= 5; ++threads) {
    run_ranks(2, [&](Rank& rank) {
      BufferOptions options = options_for(shapes);
      options.num_threads = rank.index() == 0 ? threads : 1 + threads % 3;
      Buffer buffer(rank.communicator(), options);
      for (const Scenario& scenario : scenarios) {
        Exchange exchange(rank, scenario, buffer);
        exchange.run(buffer);
      }
    });
  }
}

TEST(CpuThreads, MoreThreadsThanWorkDoNoHarm) {
  const Scenario scenario = make_scenario({.max_tokens = 2, .tokens = {0, 1}});
  run_ranks(2, [&](Rank& rank) {
    BufferOptions options = options_for(scenario.shape);
    options.num_threads = 16;
    Buffer buffer(rank.communicator(), options);
    Exchange exchange(rank, scenario, buffer);
    for (int repetition = 0; repetition < 3; ++repetition) exchange.run(buffer);
  });
}

// A rank may also come from another thread each time, one at a time.
TEST(CpuThreads, CallsMayComeFromAnyThreadOneAtATime) {
  const Scenario scenario = make_scenario({});
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    for (int repetition = 0; repetition < 4; ++repetition) {
      std::thread([&] { exchange.run(buffer); }).join();
    }
  });
}

// Report: two buffers used at the same time by two threads of a rank disturbed each other.
TEST(CpuThreads, TwoBuffersAtOnceByTwoThreadsOfEachRank) {
  constexpr int kNumRounds = 30;
  std::array<std::vector<Scenario>, 2> scenarios;
  std::array<BufferOptions, 2> options;
  for (int which = 0; which < 2; ++which) {
    std::vector<Shape> shapes = shapes_for_workers();
    for (Shape& shape : shapes) shape.seed += 100 * which;
    scenarios[which] = make_scenarios(shapes);
    options[which] = options_for(shapes);
  }
  run_ranks(2, [&](Rank& rank) {
    std::array<Buffer, 2> buffers = {Buffer(rank.communicator(), options[0]),
                                     Buffer(rank.communicator(), options[1])};
    // A Rank gathers failures for one thread: each thread has its own.
    std::array<Rank, 2> helpers = {Rank(rank.communicator()), Rank(rank.communicator())};
    std::array<std::thread, 2> threads;
    for (int which = 0; which < 2; ++which) {
      threads[which] = std::thread([&, which] {
        try {
          for (int round = 0; round < kNumRounds; ++round) {
            const Scenario& scenario = scenarios[which][round % scenarios[which].size()];
            Exchange exchange(helpers[which], scenario, buffers[which]);
            exchange.run(buffers[which]);
          }
        } catch (const Error& error) {
          helpers[which].fail(error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Rank& helper : helpers) {
      if (!helper.failures().empty()) rank.fail(helper.failures());
    }
  });
}

}  // namespace
}  // namespace tandem::test
