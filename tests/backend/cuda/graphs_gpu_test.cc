// Captured graphs: several on one buffer, of several shapes and lengths, replayed in any order and
// mixed with eager calls, ranks differing in which of the two they do.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

Shape of_tokens(int max_tokens, std::uint64_t seed) {
  return {.num_ranks = 2,
          .num_experts = 8,
          .hidden = 256,
          .topk = 4,
          .max_tokens = max_tokens,
          .seed = seed};
}

// One thing that all ranks do together: a list of pairs, as graph or eagerly.
struct Program {
  std::vector<int> scenarios;
  std::vector<bool> zero_copy;
};

// Report: graphs captured for several sizes on one buffer corrupted each other.
TEST(CudaGraphs, ReplayInAnyOrderMixedWithEagerCalls) {
  constexpr int kRounds = 500;
  const std::vector<Shape> shapes = {of_tokens(1, 1), of_tokens(2, 2), of_tokens(4, 3),
                                     of_tokens(8, 4)};
  const std::vector<Scenario> scenarios = make_scenarios(shapes);
  // Each size with and without zero-copy, and longer ones that mix sizes.
  std::vector<Program> programs;
  for (int scenario = 0; scenario < 4; ++scenario) {
    programs.push_back({{scenario}, {false}});
    programs.push_back({{scenario}, {true}});
  }
  programs.push_back({{0, 3, 1}, {true, false, true}});
  programs.push_back({{3, 2, 2, 0, 3}, {true, true, false, false, true}});

  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shapes));
    const Stream stream;
    std::vector<std::unique_ptr<Pair>> pairs;
    for (const Scenario& scenario : scenarios) {
      pairs.push_back(std::make_unique<Pair>(rank, scenario, buffer));
    }
    std::vector<std::unique_ptr<Graph>> graphs;
    std::vector<DispatchResult> captured(programs.size());  // of each program's last dispatch
    const auto run = [&](const Program& program) {
      DispatchResult last;
      for (std::size_t i = 0; i < program.scenarios.size(); ++i) {
        last = pairs[static_cast<std::size_t>(program.scenarios[i])]->run(stream,
                                                                          program.zero_copy[i]);
      }
      return last;
    };
    for (std::size_t i = 0; i < programs.size(); ++i) {
      graphs.push_back(std::make_unique<Graph>(stream, [&] { captured[i] = run(programs[i]); }));
    }
    std::mt19937 shared(7);  // the same choice of programs on all ranks
    std::mt19937 own(static_cast<unsigned>(rank.index()));
    for (int round = 0; round < kRounds && rank.failures().empty(); ++round) {
      const std::size_t which = shared() % programs.size();
      const bool replay = own() % 4 != 0;
      for (const int scenario : programs[which].scenarios) {
        pairs[static_cast<std::size_t>(scenario)]->spoil();
      }
      DispatchResult result = captured[which];
      rank.fence();
      if (replay) {
        graphs[which]->launch(stream);
      } else {
        result = run(programs[which]);
      }
      rank.fence();
      stream.synchronise();
      buffer.check();
      const auto last = static_cast<std::size_t>(programs[which].scenarios.back());
      const std::string report = pairs[last]->compare(result);
      rank.expect(report.empty(), "round " + std::to_string(round) + ", program " +
                                      std::to_string(which) +
                                      (replay ? " replayed: " : " run eagerly: ") + report);
      rank.fence();
    }
    rank.fence();
  });
}

// Report: one rank replayed a graph while another ran eagerly without tokens, and they met in vain.
TEST(CudaGraphs, OneRankReplaysWhileAnotherRunsEagerlyWithoutTokens) {
  for (const int replaying : {0, 1}) {
    Shape shape = of_tokens(8, 5);
    shape.tokens = replaying == 0 ? std::vector<int>{8, 0} : std::vector<int>{0, 8};
    const Scenario scenario = make_scenario(shape);
    run_ranks(2, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shape));
      const Stream stream;
      Pair pair(rank, scenario, buffer);
      DispatchResult result;
      std::unique_ptr<Graph> graph;
      if (rank.index() == replaying) {
        graph = std::make_unique<Graph>(stream, [&] { result = pair.run(stream, false); });
      }
      for (int round = 0; round < 50; ++round) {
        pair.spoil();
        rank.fence();
        if (graph != nullptr) {
          graph->launch(stream);
        } else {
          result = pair.run(stream, false);
        }
        rank.fence();
        stream.synchronise();
        buffer.check();
        const std::string report = pair.compare(result);
        rank.expect(report.empty(), report);
        rank.fence();
      }
    });
  }
}

// A graph of a send with its hook run inside, and slotted placement: both phases are captured.
TEST(CudaGraphs, HooksAreCapturedToo) {
  Shape shape = of_tokens(8, 6);
  shape.placement = Placement::kSlotted;
  shape.hook = true;
  const Scenario scenario = make_scenario(shape);
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    const Stream stream;
    Pair pair(rank, scenario, buffer);
    DispatchResult result;
    const Graph graph(stream, [&] { result = pair.run(stream, false); });
    for (int round = 0; round < 50; ++round) {
      pair.spoil();
      rank.fence();
      graph.launch(stream);
      rank.fence();
      stream.synchronise();
      buffer.check();
      const std::string report = pair.compare(result);
      rank.expect(report.empty(), report);
      rank.fence();
    }
  });
}

// Nothing says that a graph is replayed once it is there: peers never notice those that are not.
TEST(CudaGraphs, ACapturedGraphNeedNotBeReplayed) {
  const Scenario scenario = make_scenario(of_tokens(4, 8));
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    const Stream stream;
    Pair pair(rank, scenario, buffer);
    if (rank.index() == 0) {
      const Graph unused(stream, [&] { pair.run(stream, true); });
    }
    pair.spoil();
    rank.fence();
    const DispatchResult result = pair.run(stream, true);
    rank.fence();
    stream.synchronise();
    buffer.check();
    const std::string report = pair.compare(result);
    rank.expect(report.empty(), report);
    rank.fence();
  });
}

}  // namespace
}  // namespace tandem::test
