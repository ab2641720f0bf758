// What only CPU ranks can show: how much memory a buffer takes, that it stays inside, that it is
// given back, and that failure to have it is said.
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "core/validation.h"
#include "layout/block.h"
#include "runtime/backend.h"
#include "support/exchange.h"

namespace tandem::test {
namespace {

layout::Block block_of(const BufferOptions& options, int num_ranks) {
  return layout::Block(core::make_capacity(options, core::make_expert_map(options, num_ranks),
                                           runtime::backend(Backend::kCpu).num_arrival_words()));
}

int num_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<int>(std::distance(begin(files), end(files)));
}

// Sizes of this process's mappings of shared memory that the library made.
std::vector<std::int64_t> shared_mappings() {
  std::vector<std::int64_t> sizes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tandem (deleted)") == std::string::npos) continue;
    const std::int64_t first = std::stoll(line, nullptr, 16);
    const std::int64_t last = std::stoll(line.substr(line.find('-') + 1), nullptr, 16);
    sizes.push_back(last - first);
  }
  return sizes;
}

std::int64_t virtual_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages;
  return pages * 4096;
}

// Report: the size hint and the allocation disagreed, and rows went past the end.
TEST(CpuResources, SizeHintEqualsTheAllocation) {
  std::vector<BufferOptions> all;
  for (const Shape& shape :
       {Shape{.num_ranks = 3}, Shape{.num_ranks = 3, .hidden = 1000, .format = Format::kFp8},
        Shape{.num_ranks = 3, .placement = Placement::kSlotted, .layout = Layout::kPacked}}) {
    all.push_back(options_for(shape));
    all.back().combine = all.size() % 2 == 0;
  }
  run_ranks(3, [&](Rank& rank) {
    for (const BufferOptions& options : all) {
      const std::int64_t size = Buffer::size_bytes(options, 3);
      rank.expect_equal(size, block_of(options, 3).size_bytes(), "size");
      const Buffer buffer(rank.communicator(), options);
      if (!ranks_are_processes()) continue;  // anonymous memory does not say what it is for
      std::int64_t total = 0;
      for (const std::int64_t mapped : shared_mappings()) total += mapped;
      rank.expect_equal(total, 3 * size, "bytes mapped");
    }
  });
}

// Options that exclude a region make the buffer smaller by it.
TEST(CpuResources, ExcludedRegionsTakeNoMemory) {
  BufferOptions all = options_for(Shape{.num_experts = 64, .hidden = 1024, .max_tokens = 64});
  all.slotted_placement = true;
  const std::int64_t full = Buffer::size_bytes(all, 4);
  const auto without = [&](auto change) {
    BufferOptions options = all;
    change(options);
    return Buffer::size_bytes(options, 4);
  };
  EXPECT_LT(without([](BufferOptions& o) { o.slotted_placement = false; }), full);
  EXPECT_LT(without([](BufferOptions& o) { o.packed_placement = false; }), full);
  EXPECT_LT(without([](BufferOptions& o) { o.combine = false; }), full);
  EXPECT_LT(without([](BufferOptions& o) { o.padded_layout = false; }), full / 2);
  EXPECT_LT(without([](BufferOptions& o) { o.capacity_rows = 100; }), full / 2);
}

// The bytes between regions, and after the last, are guards: filled before, intact after the buffer
// was used to its last row in every region.
TEST(CpuResources, BytesBetweenRegionsStayIntact) {
  const Shape packed{.num_ranks = 2,
                     .num_experts = 2,
                     .hidden = 24,
                     .topk = 1,
                     .max_tokens = 11,
                     .layout = Layout::kPacked,
                     .routing = Routing::kHot};
  Shape slotted = packed;
  slotted.placement = Placement::kSlotted;
  BufferOptions options = options_for({packed, slotted});
  options.capacity_rows = 22;
  const layout::Block block = block_of(options, 2);
  const layout::Capacity& capacity = block.capacity();
  std::vector<std::pair<std::int64_t, std::int64_t>> used = {{0, block.control_bytes()}};
  for (int half = 0; half < layout::kNumHalves; ++half) {
    used.emplace_back(block.view_sources(half),
                      block.view_rows(half) + capacity.view_rows * capacity.dispatch_pitch);
    used.emplace_back(block.combine_rows(half),
                      block.combine_rows(half) + capacity.combine_rows * capacity.combine_pitch);
    used.emplace_back(block.landing_sources(half),
                      block.landing_rows(half) + capacity.landing_rows * capacity.dispatch_pitch);
  }
  std::sort(used.begin(), used.end());
  std::vector<std::pair<std::int64_t, std::int64_t>> gaps;
  for (std::size_t region = 0; region < used.size(); ++region) {
    const bool last = region + 1 == used.size();
    const std::int64_t next = last ? block.size_bytes() : used[region + 1].first;
    ASSERT_LE(used[region].second, next);
    gaps.emplace_back(used[region].second, next);
  }
  const std::vector<Scenario> scenarios = make_scenarios({packed, slotted});
  ASSERT_EQ(scenarios[0].received[0].num_rows, 22);

  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options);
    Exchange first(rank, scenarios[0], buffer);
    Exchange second(rank, scenarios[1], buffer);
    first.run(buffer);
    // The first dispatch of a buffer takes half 0.
    std::byte* const own = first.result().x.as<std::byte>() - block.view_rows(0);
    for (const auto& [begin, end] : gaps) std::memset(own + begin, 0xcd, end - begin);
    for (int repetition = 0; repetition < 4; ++repetition) {
      first.run(buffer);
      second.run(buffer);
    }
    rank.barrier();
    for (const auto& [begin, end] : gaps) {
      const bool intact = std::all_of(own + begin, own + end,
                                      [](std::byte byte) { return byte == std::byte{0xcd}; });
      rank.expect(intact, "bytes after " + std::to_string(begin) + " overwritten");
    }
  });
}

// A buffer whose last rows lie behind 4 GiB of its view. Only touched pages exist.
constexpr int kFarExperts = 16;
constexpr int kFarAlignment = 2200;  // times 15 experts times 128 KiB: 4.3e9 bytes
constexpr int kFarTokens = 2;

BufferOptions far_options() {
  BufferOptions options{.num_experts = kFarExperts,
                        .max_tokens = kFarTokens,
                        .max_hidden = kMaxHidden,
                        .max_topk = kFarExperts,
                        .slotted_placement = false,
                        .padded_layout = false};
  options.capacity_rows = kFarExperts * kFarAlignment;
  options.timeout = std::chrono::seconds(20);
  return options;
}

// Every token to every expert, twice for both halves.
void use_far_rows(Rank& rank, Buffer& buffer) {
  constexpr int kHidden = kMaxHidden;
  std::vector<bfloat16> x(kFarTokens * kHidden);
  for (std::size_t index = 0; index < x.size(); ++index) {
    x[index].bits = static_cast<std::uint16_t>(index * 40503 >> 4);
  }
  std::vector<std::int64_t> indices;
  std::vector<float> weights;
  for (int place = 0; place < kFarTokens * kFarExperts; ++place) {
    indices.push_back(place % kFarExperts);
    weights.push_back(place < kFarExperts ? 1.0F : 2.0F);
  }
  for (int repetition = 0; repetition < 2; ++repetition) {
    const DispatchResult result =
        buffer.dispatch(view_of(x.data(), {kFarTokens, kHidden}),
                        view_of(indices.data(), {kFarTokens, kFarExperts}),
                        {.layout = Layout::kPacked, .row_alignment = kFarAlignment});
    const auto place_of = [&](int expert, int token) {
      return std::int64_t{expert} * kFarAlignment + token;
    };
    for (int expert = 0; expert < kFarExperts; ++expert) {
      rank.expect_equal(result.offsets.as<std::int64_t>()[expert], place_of(expert, 0), "offset");
      for (int token = 0; token < kFarTokens; ++token) {
        const std::int64_t place = place_of(expert, token);
        const bfloat16* received = result.x.as<bfloat16>() + place * result.x.strides[0];
        rank.expect(std::memcmp(received, &x[token * kHidden], kHidden * sizeof(bfloat16)) == 0,
                    "row " + std::to_string(place) + " differs");
      }
    }
    if (!buffer.options().combine) continue;
    const TensorView y = buffer.next_combine_buffer(result.handle, DType::kBFloat16);
    for (int expert = 0; expert < kFarExperts; ++expert) {
      for (int token = 0; token < kFarTokens; ++token) {
        std::fill_n(y.as<bfloat16>() + place_of(expert, token) * y.strides[0], kHidden,
                    to_bfloat16(static_cast<float>(expert)));
      }
    }
    std::vector<bfloat16> out(kFarTokens * kHidden);
    buffer.combine(y, view_of(weights.data(), {kFarTokens, kFarExperts}), result.handle,
                   view_of(out.data(), {kFarTokens, kHidden}));
    for (std::size_t index = 0; index < out.size(); index += kHidden - 1) {
      const float expected = index < kHidden ? 120.0F : 240.0F;  // 0 + 1 + ... + 15, weighted
      rank.expect_equal(to_float(out[index]), expected, "combined");
    }
  }
}

// Report: a cliff at 2^31 bytes or elements. Both regions where the machine has 18 GB, the view
// alone where it has 9.
TEST(CpuResources, BufferOfMoreThanFourGigabytesWorksToItsLastRow) {
  BufferOptions options = far_options();
  const layout::Block block = block_of(options, 1);
  ASSERT_GT(block.combine_rows(0) - block.view_rows(0), std::int64_t{1} << 32);
  run_ranks(1, [&](Rank& rank) {
    for (const bool combine : {true, false}) {
      options.combine = combine;
      try {
        Buffer buffer(rank.communicator(), options);
        use_far_rows(rank, buffer);
        return;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kResource) throw;
        std::cout << "this machine has no room: " << error.what() << std::endl;
      }
    }
  });
}

// Report: a failed allocation surfaced as a crash much later. It says the bytes asked and there.
TEST(CpuResources, AllocationFailureSaysTheBytesAskedAndAvailable) {
  BufferOptions huge{
      .num_experts = 64, .max_tokens = 1 << 20, .max_hidden = kMaxHidden, .padded_layout = false};
  const std::int64_t size = Buffer::size_bytes(huge, 2);
  EXPECT_GT(size, std::int64_t{1} << 42);
  const Scenario scenario = make_scenario({});
  run_ranks(2, [&](Rank& rank) {
    const ErrorInfo info =
        rank.expect_error(ErrorCode::kResource, {std::to_string(size), "available"},
                          [&] { Buffer(rank.communicator(), huge); });
    rank.expect_equal(info.expected, size, "bytes asked");
    rank.expect(info.seen > 0 && info.seen < size, "bytes available");
    Buffer buffer(rank.communicator(), options_for(scenario.shape));
    Exchange exchange(rank, scenario, buffer);
    exchange.run(buffer);
  });
}

// Report: buffers that were made and destroyed leaked memory, mappings and descriptors.
TEST(CpuResources, FiftyCyclesLeakNothing) {
  const Scenario scenario = make_scenario({.num_ranks = 3});
  BufferOptions options = options_for(scenario.shape);
  options.max_tokens = 4096;  // much address space, little of it touched
  options.max_hidden = 1024;
  const std::int64_t size = Buffer::size_bytes(options, 3);
  ASSERT_GT(size, 64 << 20);
  run_ranks(3, [&](Rank& rank) {
    const auto cycle = [&] {
      Buffer buffer(rank.communicator(), options);
      Exchange exchange(rank, scenario, buffer);
      exchange.run(buffer);
    };
    for (int warm = 0; warm < 3; ++warm) cycle();
    // Looking opens a file, which another would count: of the threads of one process, one looks.
    const bool looks = ranks_are_processes() || rank.index() == 0;
    rank.barrier();
    const int files = looks ? num_open_files() : 0;
    const std::int64_t bytes = looks ? virtual_bytes() : 0;
    rank.barrier();
    for (int repetition = 0; repetition < 50; ++repetition) cycle();
    rank.barrier();
    if (looks) {
      rank.expect_equal(num_open_files(), files, "open files");
      rank.expect_equal(shared_mappings().size(), std::size_t{0}, "mappings");
      rank.expect(virtual_bytes() - bytes < 3 * size, "address space grew");
    }
    rank.barrier();
  });
}

// Report: tokens that select nothing cost as much as others. Here their rows cannot even be read:
// whoever touches one dies.
TEST(CpuResources, RowsOfTokensThatSelectNothingAreNotTouched) {
  constexpr int kSelecting = 8;
  const Shape shape{.num_ranks = 2,
                    .num_experts = 8,
                    .hidden = 4096,
                    .topk = 8,
                    .max_tokens = 128,
                    .routing = Routing::kFull};
  reference::Problem problem = make_problem(shape);
  for (reference::RankInput& input : problem.ranks) {
    std::fill(input.topk_idx.begin() + std::ptrdiff_t{kSelecting} * shape.topk,
              input.topk_idx.end(), -1);
  }
  const Scenario scenario = solve(shape, problem);
  run_ranks(2, [&](Rank& rank) {
    Buffer buffer(rank.communicator(), options_for(shape));
    Exchange exchange(rank, scenario, buffer);
    const auto bytes = static_cast<std::size_t>(shape.max_tokens) * shape.hidden * 2;
    const std::size_t readable = bytes / shape.max_tokens * kSelecting;  // whole pages
    void* const rows = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    rank.expect(::mprotect(rows, readable, PROT_READ | PROT_WRITE) == 0, "readable rows");
    std::memcpy(rows, exchange.x().data, readable);
    ConstTensorView x = exchange.x();
    x.data = rows;
    exchange.result() = buffer.dispatch(x, exchange.topk_idx(), exchange.dispatch_options());
    exchange.check_received();
    ::munmap(rows, bytes);
  });
}

}  // namespace
}  // namespace tandem::test
