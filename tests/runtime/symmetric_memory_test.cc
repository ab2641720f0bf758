// Blocks that all ranks map: their size, their refusal, and that nothing of them stays behind.
#include "runtime/symmetric_memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "runtime/launch.h"
#include "runtime/memory_file.h"
#include "runtime/memory_limit.h"

namespace tandem::runtime {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

int num_descriptors() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

int num_lines_with(const std::string& path, const std::string& text) {
  std::ifstream file(path);
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.find(text) != std::string::npos) ++count;
  }
  return count;
}

std::int64_t mapped_bytes() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

class SymmetricMemories : public testing::TestWithParam<Launch> {};

TEST_P(SymmetricMemories, OfMoreThanFourGibibytesReachTheirLastByte) {
  run(GetParam(), 2, [](const Communicator& communicator) {
    const std::int64_t size = 5 * kGiB;
    SymmetricMemory memory(*communicator.bootstrap(), size);
    const int rank = communicator.rank();
    const int peer = 1 - rank;
    for (const std::int64_t offset :
         {std::int64_t{0}, 2 * kGiB, 4 * kGiB - 1, 4 * kGiB, size - 1}) {
      require(memory.block(peer)[offset] == std::byte{0}, "zero at first");
      communicator.barrier();
      memory.block(peer)[offset] = static_cast<std::byte>(rank + 1);
      communicator.barrier();
      require(memory.block(rank)[offset] == static_cast<std::byte>(peer + 1), "the peer's byte");
      communicator.barrier();
      memory.block(peer)[offset] = std::byte{0};
      communicator.barrier();
    }
  });
}

TEST_P(SymmetricMemories, TooLargeForTheMachineAreRefusedOnAllRanksAlike) {
  run(GetParam(), 3, [](const Communicator& communicator) {
    const std::int64_t ten_tebibytes = 10 * 1024 * kGiB;
    const std::int64_t available = memory_limit().bytes;
    for (const std::int64_t size : {ten_tebibytes, available + 1, INT64_MAX}) {
      const auto start = steady_clock::now();
      require_error(
          ErrorCode::kResource, 0,
          {std::to_string(size) + " bytes", std::to_string(available) + " bytes available"},
          [&] { SymmetricMemory memory(*communicator.bootstrap(), size); });
      require(steady_clock::now() - start < milliseconds(20'000), "before the timeout");
    }
    // The communicator goes on.
    SymmetricMemory memory(*communicator.bootstrap(), 4096);
  });
}

TEST_P(SymmetricMemories, OfDifferentSizesAreRefusedOnAllRanks) {
  run(GetParam(), 3, [](const Communicator& communicator) {
    require_error(ErrorCode::kMismatch, 1, {"rank 1 asks for 8192 bytes", "rank 0 for 4096"}, [&] {
      SymmetricMemory memory(*communicator.bootstrap(), communicator.rank() == 1 ? 8192 : 4096);
    });
    require_error(ErrorCode::kInvalidArgument, 0, {"asks for 0 bytes"},
                  [&] { SymmetricMemory memory(*communicator.bootstrap(), 0); });
  });
}

TEST_P(SymmetricMemories, LeaveNothingBehindAfterFiftyCycles) {
  run(GetParam(), 2, [](const Communicator& communicator) {
    std::int64_t mapped_before = 0;
    int descriptors_before = 0;
    // Ranks that are threads share a process: one that counts would see what another has open to
    // count.
    const auto in_turn = [&](const auto& count) {
      for (int rank = 0; rank < communicator.size(); ++rank) {
        if (rank == communicator.rank()) count();
        communicator.barrier();
      }
    };
    for (int cycle = 0; cycle < 55; ++cycle) {
      {
        SymmetricMemory memory(*communicator.bootstrap(), kGiB / 4);
        memory.block(communicator.rank())[0] = std::byte{1};
        communicator.barrier();
      }
      communicator.barrier();
      if (cycle == 4) {
        in_turn([&] {
          mapped_before = mapped_bytes();
          descriptors_before = num_descriptors();
        });
      }
    }
    in_turn([&] {
      require(num_descriptors() == descriptors_before, "no descriptor is left");
      require(mapped_bytes() - mapped_before < kGiB, "no block is left mapped");
      require(num_lines_with("/proc/self/maps", "memfd:tandem") == 0, "no mapping is left");
    });
  });
}

INSTANTIATE_TEST_SUITE_P(All, SymmetricMemories,
                         testing::Values(Launch::kThreads, Launch::kProcesses),
                         [](const auto& instance) { return name_of(instance.param); });

TEST(SymmetricMemory, OutlivesThePeerThatMadeIt) {
  run(Launch::kProcesses, 2, [](const Communicator& communicator) {
    SymmetricMemory memory(*communicator.bootstrap(), 4096);
    memory.block(communicator.rank())[100] = static_cast<std::byte>(7 + communicator.rank());
    communicator.barrier();
    if (communicator.rank() == 1) return;
    require_error(ErrorCode::kPeerLost, 1, {}, [&] { communicator.barrier(); });
    require(memory.block(1)[100] == std::byte{8}, "what the peer wrote");
  });
}

TEST(SymmetricMemory, RefusedByOneRanksLimitsIsRefusedOnAll) {
  run(Launch::kProcesses, 3, [](const Communicator& communicator) {
    if (communicator.rank() == 1) {
      const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
      require(setrlimit(RLIMIT_FSIZE, &limit) == 0, "a limit on files");
    }
    require_error(ErrorCode::kResource, 1,
                  {"rank 1 cannot have 2097152 bytes", "1048576 bytes available (ulimit -f)"},
                  [&] { SymmetricMemory memory(*communicator.bootstrap(), 2 << 20); });
    if (communicator.rank() == 2) {
      const auto most = static_cast<rlim_t>(mapped_bytes() + kGiB / 4);
      const rlimit limit{.rlim_cur = most, .rlim_max = most};
      require(setrlimit(RLIMIT_AS, &limit) == 0, "a limit on address space");
    }
    require_error(ErrorCode::kResource, 2, {"rank 2 cannot have", "mmap"}, [&] {
      // Small enough for rank 1's file.
      std::vector<std::unique_ptr<SymmetricMemory>> memories;
      for (int i = 0; i < 300; ++i) {
        memories.push_back(std::make_unique<SymmetricMemory>(*communicator.bootstrap(), 1 << 20));
      }
    });
    communicator.barrier();
  });
}

TEST(SymmetricMemory, BetweenProcessesHasNoNameEvenWhenOneIsKilled) {
  const std::string name = unique_name();
  const auto exits = run_processes(3, [&](const Communicator& outer) {
    const auto communicator = Communicator::connect(name, outer.rank(), outer.size());
    SymmetricMemory memory(*communicator.bootstrap(), 1 << 20);
    require(num_lines_with("/proc/self/maps", "/memfd:tandem (deleted)") == 3, "three mappings");
    communicator.barrier();
    if (communicator.rank() == 1) raise(SIGKILL);
    require_error(ErrorCode::kPeerLost, 1, {}, [&] { communicator.barrier(); });
    return 0;
  });
  EXPECT_EQ(exits[0].error, "");
  EXPECT_EQ(exits[1].signal, SIGKILL);
  EXPECT_EQ(exits[2].error, "");
  EXPECT_EQ(num_lines_with("/proc/net/unix", name), 0);
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().string().find("tandem"), std::string::npos) << entry.path();
  }
}

// A rank that is a thread, and comes later, is handed the descriptors of files that others have
// mapped.
TEST(MemoryFiles, AreMappedOnceForThreadsThatShareThem) {
  constexpr std::int64_t kBytes = 8192;
  const MemoryFile file = make_memory_file("tandem", kBytes);
  const MemoryFile other = make_memory_file("tandem", kBytes);
  Mapping first = map_shared(file.descriptor, kBytes);
  Mapping second = map_shared(file.descriptor.duplicate(), kBytes);
  EXPECT_EQ(first.memory, second.memory);
  EXPECT_NE(first.memory, map_shared(other.descriptor, kBytes).memory);
  first.memory.get()[kBytes - 1] = std::byte{7};
  first.memory.reset();
  EXPECT_EQ(second.memory.get()[kBytes - 1], std::byte{7});
  second.memory.reset();
  EXPECT_EQ(num_lines_with("/proc/self/maps", "memfd:tandem"), 0);
  EXPECT_EQ(map_shared(file.descriptor, kBytes).memory.get()[kBytes - 1], std::byte{7});
}

TEST(Communicators, LeaveNoDescriptorBehindAfterFiftyCycles) {
  const std::string name = unique_name();
  run(Launch::kProcesses, 3, [&](const Communicator& outer) {
    outer.barrier();
    const int before = num_descriptors();
    for (int cycle = 0; cycle < 50; ++cycle) {
      const auto communicator = Communicator::connect(name, outer.rank(), outer.size());
      SymmetricMemory memory(*communicator.bootstrap(), 4096);
      communicator.barrier();
    }
    require(num_descriptors() == before, "no descriptor is left");
  });
}

// A tree that looks like /proc and /sys.
class FakeRoot {
 public:
  FakeRoot() : path_(testing::TempDir() + "tandem-limits-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary directory");
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path full = path_ + file;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  [[nodiscard]] MemoryLimit limit() const { return memory_limit(path_); }

 private:
  std::string path_;
};

TEST(MemoryLimit, IsMemoryAndSwap) {
  const FakeRoot root;
  root.write("/proc/meminfo", "MemTotal:  1000 kB\nMemFree: 5 kB\nSwapTotal: 24 kB\nOdd\n");
  EXPECT_EQ(root.limit().bytes, 1024 * 1024);
}

TEST(MemoryLimit, IsThatOfTheControlGroupOrOfOneAboveWhereLower) {
  const FakeRoot root;
  root.write("/proc/meminfo", "MemTotal:  1000 kB\nSwapTotal: 0 kB\n");
  root.write("/proc/self/cgroup", "0::/outer/inner\n");
  root.write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  EXPECT_EQ(root.limit().bytes, 1000 * 1024);
  root.write("/sys/fs/cgroup/outer/memory.max", "50000\n");
  EXPECT_EQ(root.limit().bytes, 50'000);
  root.write("/sys/fs/cgroup/outer/inner/memory.max", "4096\n");
  EXPECT_EQ(root.limit().bytes, 4096);
  EXPECT_NE(root.limit().what.find("control group"), std::string::npos);
}

TEST(MemoryLimit, IsReadFromTheOlderHierarchyToo) {
  const FakeRoot root;
  root.write("/proc/meminfo", "MemTotal:  1000 kB\n");
  root.write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\nnonsense\n");
  root.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(root.limit().bytes, 1000 * 1024);
  root.write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "8192\n");
  EXPECT_EQ(root.limit().bytes, 8192);
}

TEST(MemoryLimit, UnknownMeansNone) { EXPECT_EQ(FakeRoot().limit().bytes, INT64_MAX); }

}  // namespace
}  // namespace tandem::runtime
