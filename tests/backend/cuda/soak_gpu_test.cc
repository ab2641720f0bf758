// A thousand pairs without a barrier between them, one rank late at random: every result is right.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "backend/cuda/gpu_support.h"

namespace tandem::test {
namespace {

constexpr int kPairs = 1000;
// A stream takes about a thousand launches before it makes its caller wait, with a lock that the
// peers' launches need: ranks in one process may not run away from each other so far.
constexpr int kPairsBetweenMeetings = 50;

TEST(CudaSoak, ThousandPairsWithRandomDelays) {
  for (const bool slotted : {false, true}) {
    std::vector<Shape> shapes;
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      Shape shape{.num_ranks = 4,
                  .num_experts = 8,
                  .hidden = 128 * static_cast<int>(seed),
                  .topk = 4,
                  .max_tokens = 8,
                  .seed = seed};
      shape.tokens = {8, static_cast<int>(seed), 0, 8 - static_cast<int>(seed)};
      shape.placement = slotted ? Placement::kSlotted : Placement::kPacked;
      shapes.push_back(shape);
    }
    const std::vector<Scenario> scenarios = make_scenarios(shapes);
    run_ranks(4, [&](Rank& rank) {
      Buffer buffer(rank.communicator(), options_for(shapes));
      const Stream stream;
      std::vector<std::unique_ptr<Pair>> pairs;
      // Room for the result of every pair: they are looked at in the end.
      std::vector<Array> results;
      for (const Scenario& scenario : scenarios) {
        pairs.push_back(std::make_unique<Pair>(rank, scenario, buffer));
        const TensorView out = pairs.back()->exchange().out();
        results.emplace_back(
            Backend::kCuda, out.dtype,
            std::initializer_list<std::int64_t>{
                kPairs * out.shape[0] / static_cast<int>(scenarios.size()), out.shape[1]});
      }
      std::mt19937 random(static_cast<unsigned>(rank.index()) + 1);
      const auto result_of = [&](int pair) {
        const std::size_t which = static_cast<std::size_t>(pair) % scenarios.size();
        const TensorView out = pairs[which]->exchange().out();
        TensorView slice = out;
        slice.data =
            results[which].view().as<std::byte>() +
            pair / static_cast<int>(scenarios.size()) * out.num_elements() * size_of(out.dtype);
        return slice;
      };
      rank.fence();
      for (int pair = 0; pair < kPairs; ++pair) {
        if (pair % kPairsBetweenMeetings == 0) rank.fence();
        if (rank.index() == 1 && random() % 8 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        }
        Pair& current = *pairs[static_cast<std::size_t>(pair) % pairs.size()];
        current.run(stream, pair % 3 == 0);
        const TensorView out = current.exchange().out();
        if (out.num_elements() == 0) continue;
        require_cuda(cudaMemcpyAsync(result_of(pair).data, out.data,
                                     static_cast<std::size_t>(out.num_elements()) *
                                         static_cast<std::size_t>(size_of(out.dtype)),
                                     cudaMemcpyDeviceToDevice, stream.get()),
                     "cudaMemcpyAsync");
      }
      rank.fence();
      stream.synchronise();
      buffer.check();
      for (int pair = 0; pair < kPairs && rank.failures().empty(); ++pair) {
        const Scenario& scenario = scenarios[static_cast<std::size_t>(pair) % scenarios.size()];
        const std::string report =
            compare_combined(scenario, rank.index(), result_of(pair), rank.stream());
        rank.expect(report.empty(), "pair " + std::to_string(pair) + ": " + report);
      }
      rank.fence();
    });
  }
}

}  // namespace
}  // namespace tandem::test
