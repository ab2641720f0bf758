// What the machine's memory allows: time to write, and to copy, as many bytes as a dispatch of each
// size writes, with ordinary stores and with stores that pass the cache, by one thread and by two
// at once. The memory is Tandem's kind (a memfd, shared, every page present). As a dispatch does,
// successive rounds write two destinations in turn and a copy takes each row of its source `topk`
// times. Prints a line of JSON per measurement. Compiled with -O3 -march=native.
//
// With --handover only this: how long a line of memory takes from one core to the other. Virtual
// cores may share a cache at one time and not at another.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>
#include <thread>

#include "command_line.h"
#include "harness.h"

namespace tandem::bench {
namespace {

// Bytes of shared memory, mapped and present.
class SharedMemory {
 public:
  explicit SharedMemory(std::int64_t size_bytes) : size_bytes_(size_bytes) {
    const int fd = memfd_create("bandwidth", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size_bytes) != 0) throw std::bad_alloc();
    data_ = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    close(fd);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    std::memset(data_, 1, size_bytes);
  }
  ~SharedMemory() { munmap(data_, size_bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::int64_t size_bytes_;
  void* data_ = nullptr;
};

enum class Kind { kWrite, kWriteStreaming, kCopy, kCopyStreaming };
constexpr Kind kKinds[] = {Kind::kWrite, Kind::kWriteStreaming, Kind::kCopy, Kind::kCopyStreaming};

const char* name(Kind kind) {
  switch (kind) {
    case Kind::kWrite:
      return "write";
    case Kind::kWriteStreaming:
      return "write-streaming";
    case Kind::kCopy:
      return "copy";
    case Kind::kCopyStreaming:
      return "copy-streaming";
  }
  return "";
}

#if defined(__AVX512F__)
using Vector = __m512i;
Vector load(const std::byte* from) { return _mm512_load_si512(from); }
void store(std::byte* to, Vector value) { _mm512_store_si512(to, value); }
void stream(std::byte* to, Vector value) {
  _mm512_stream_si512(reinterpret_cast<Vector*>(to), value);
}
Vector any_value() { return _mm512_set1_epi32(0x3f803f80); }
void finish_streaming() { _mm_sfence(); }
#elif defined(__AVX2__)
using Vector = __m256i;
Vector load(const std::byte* from) {
  return _mm256_load_si256(reinterpret_cast<const Vector*>(from));
}
void store(std::byte* to, Vector value) {
  _mm256_store_si256(reinterpret_cast<Vector*>(to), value);
}
void stream(std::byte* to, Vector value) {
  _mm256_stream_si256(reinterpret_cast<Vector*>(to), value);
}
Vector any_value() { return _mm256_set1_epi32(0x3f803f80); }
void finish_streaming() { _mm_sfence(); }
#else  // no streaming stores that a portable program can ask for
using Vector = std::uint64_t;
Vector load(const std::byte* from) { return *reinterpret_cast<const Vector*>(from); }
void store(std::byte* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
void stream(std::byte* to, Vector value) { store(to, value); }
Vector any_value() { return 0x3f803f803f803f80ULL; }
void finish_streaming() {}
#endif

// One row, a multiple of the vector's size.
void move_row(std::byte* to, const std::byte* from, std::int64_t bytes, Kind kind) {
  constexpr std::int64_t kStep = sizeof(Vector);
  const Vector value = any_value();
  switch (kind) {
    case Kind::kWrite:
      for (std::int64_t i = 0; i < bytes; i += kStep) store(to + i, value);
      break;
    case Kind::kWriteStreaming:
      for (std::int64_t i = 0; i < bytes; i += kStep) stream(to + i, value);
      break;
    case Kind::kCopy:
      for (std::int64_t i = 0; i < bytes; i += kStep) store(to + i, load(from + i));
      break;
    case Kind::kCopyStreaming:
      for (std::int64_t i = 0; i < bytes; i += kStep) stream(to + i, load(from + i));
      break;
  }
}

void pin_to_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

// Nanoseconds from one core's store to its being seen on another: two threads take turns. The
// quickest of many spells, as other programs may interrupt some.
double handover_ns() {
  constexpr int kSpells = 100;
  constexpr int kTurns = 2000;
  alignas(128) std::atomic<int> turn = 0;
  std::vector<double> times(kSpells);
  const auto take_turns = [&](int thread) {
    pin_to_core(thread);
    int mine = thread;
    for (double& time : times) {
      const double start = now_us();
      for (const int end = mine + kTurns; mine < end; mine += 2) {
        while (turn.load(std::memory_order_acquire) != mine) pause();
        turn.store(mine + 1, std::memory_order_release);  // pairs with the acquire above
      }
      if (thread == 0) time = (now_us() - start) * 1e3 / kTurns;
    }
  };
  {
    const std::jthread first(take_turns, 0);
    const std::jthread second(take_turns, 1);
  }
  return *std::min_element(times.begin(), times.end());
}

struct Result {
  Statistics time;
  int iterations = 0;
};

// Every thread moves `rows` rows; the time is the slowest thread's.
Result measure_moves(int num_threads, std::int64_t rows, std::int64_t row_bytes, int topk,
                     Kind kind, double seconds) {
  SharedMemory area_memory(sizeof(SharedArea));
  std::memset(area_memory.data(), 0, sizeof(SharedArea));
  auto* area = reinterpret_cast<SharedArea*>(area_memory.data());
  std::vector<std::unique_ptr<SharedMemory>> destinations;
  std::vector<std::unique_ptr<SharedMemory>> sources;
  for (int thread = 0; thread < num_threads; ++thread) {
    destinations.push_back(std::make_unique<SharedMemory>(2 * rows * row_bytes));
    sources.push_back(std::make_unique<SharedMemory>((rows / topk + 1) * row_bytes));
  }
  const auto work = [&](int thread) {
    pin_to_core(thread % num_cores());
    const auto once = [&](int round) {
      std::byte* to = destinations[thread]->data() + (round % 2) * rows * row_bytes;
      const std::byte* from = sources[thread]->data();
      area->barrier(num_threads);
      const double start = now_us();
      for (std::int64_t row = 0; row < rows; ++row) {
        move_row(to + row * row_bytes, from + row / topk * row_bytes, row_bytes, kind);
      }
      finish_streaming();
      return now_us() - start;
    };
    for (int round = 0; round < 2; ++round) once(round);
    const double start = now_us();
    for (int round = 0; round < 2; ++round) once(round);
    if (thread == 0) {
      const double each_us = (now_us() - start) / 2;
      area->announced = static_cast<std::int32_t>(
          std::clamp(seconds * 1e6 / each_us, 5.0, double{SharedArea::kMaxIterations}));
    }
    area->barrier(num_threads);
    const int iterations = area->announced;
    for (int round = 0; round < iterations; ++round) {
      area->samples[thread][round].dispatch_us = static_cast<float>(once(round));
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(work, thread);
  }
  std::vector<double> times(area->announced);
  for (int thread = 0; thread < num_threads; ++thread) {
    for (std::size_t i = 0; i < times.size(); ++i) {
      times[i] = std::max<double>(times[i], area->samples[thread][i].dispatch_us);
    }
  }
  return {statistics(times), static_cast<int>(times.size())};
}

int run(int argc, char** argv) {
  Arguments arguments;
  arguments.seconds = 0.2;
  CLI::App app("The machine's write and copy bandwidth at the sizes of dispatches");
  add_options(app, arguments);
  bool handover = false;
  app.add_flag("--handover", handover, "Only the time that a line takes between two cores");
  CLI11_PARSE(app, argc, argv);
  if (handover) {
    std::cout << nlohmann::ordered_json{{"handover_ns", num_cores() < 2 ? 0 : handover_ns()}}
              << std::endl;
    return 0;
  }
  for (const Case& work : cases(arguments, 1)) {
    const std::int64_t row_bytes = layout::round_up(work.row().pitch(), 64);
    const std::int64_t rows = std::int64_t{work.num_tokens} * work.topk;
    for (int num_threads = 1; num_threads <= std::min(2, num_cores()); ++num_threads) {
      for (const Kind kind : kKinds) {
        const Result result =
            measure_moves(num_threads, rows, row_bytes, work.topk, kind, arguments.seconds);
        const double bytes = static_cast<double>(rows * row_bytes);
        std::cout << nlohmann::ordered_json{{"kind", name(kind)},
                                            {"threads", num_threads},
                                            {"tokens", work.num_tokens},
                                            {"hidden", work.hidden},
                                            {"format", is_fp8(work.format) ? "fp8" : "bf16"},
                                            {"bytes_per_thread", rows * row_bytes},
                                            {"us", result.time.median_us},
                                            {"p99_us", result.time.p99_us},
                                            {"gbs_per_thread", bytes / result.time.median_us / 1e3},
                                            {"iterations", result.iterations}}
                  << std::endl;
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) {
  try {
    return tandem::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memory_bandwidth: %s\n", error.what());
    return 1;
  }
}
