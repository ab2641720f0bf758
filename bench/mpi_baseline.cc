// What a user would write with MPI, done well: rows packed by destination into buffers made
// beforehand, MPI_Alltoall of the counts, MPI_Alltoallv of the rows, rows unpacked into the order
// of the experts; and back with MPI_Alltoallv and the weighted sum. Source token and fp8 scales
// travel inside the row, which saves a message. Plain loops, vectorised by the compiler (-O3
// -march=native). Run it with mpirun; rank 0 prints a line of JSON per case.
// The C interface alone.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <bit>
#include <cstdlib>
#include <memory>
#include <new>

#include "command_line.h"
#include "harness.h"
#include "workload.h"

namespace tandem::bench {
namespace {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory aligned to cache lines, touched, so that no page is missing when the clock runs.
template <typename T>
std::unique_ptr<T[], Free> make_buffer(std::int64_t count) {
  const std::size_t bytes = (std::max<std::int64_t>(count, 1) * sizeof(T) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return std::unique_ptr<T[], Free>(static_cast<T*>(memory));
}

float widen(bfloat16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }

// One row to fp8: e4m3 with a float scale per 128 channels. Branches would keep the compiler from
// vectorising: so both roundings, of normal and of subnormal results, are computed.
void quantise(const bfloat16* __restrict x, int hidden, std::uint8_t* __restrict values,
              float* __restrict scales) {
  for (int first = 0; first < hidden; first += kFp8GroupSize) {
    const int count = std::min(kFp8GroupSize, hidden - first);
    float amax = kFp8AmaxFloor;
    std::uint32_t largest = std::bit_cast<std::uint32_t>(amax);
    for (int i = 0; i < count; ++i) {
      largest = std::max(largest, (std::uint32_t{x[first + i].bits} << 16) & 0x7fffffffU);
    }
    amax = std::bit_cast<float>(largest);
    scales[first / kFp8GroupSize] = amax / kFp8Max;
    const float inverse = kFp8Max / amax;
    for (int i = 0; i < count; ++i) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(widen(x[first + i]) * inverse);
      const std::uint32_t magnitude = bits & 0x7fffffffU;
      const std::uint32_t normal =
          ((magnitude + 0x7ffffU + ((magnitude >> 20) & 1U)) >> 20) - (120U << 3);
      // Adding 2^14, whose last place is 2^-9, rounds to the subnormals' spacing.
      const std::uint32_t subnormal =
          std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0F) -
          std::bit_cast<std::uint32_t>(16384.0F);
      const std::uint32_t rounded = magnitude < 0x3c800000U ? subnormal : normal;  // 2^-6
      values[first + i] =
          static_cast<std::uint8_t>(((bits >> 24) & 0x80U) | std::min(rounded, 0x7eU));
    }
  }
}

// Inlined, g++ 12 merges the loop with its caller's over k and leaves it scalar.
[[gnu::noinline]] void accumulate(float* __restrict sum, const bfloat16* __restrict y, float weight,
                                  int count) {
  for (int i = 0; i < count; ++i) sum[i] += weight * widen(y[i]);
}

void round_to_bfloat16(bfloat16* __restrict out, const float* __restrict sum, int count) {
  for (int i = 0; i < count; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(sum[i]);
    out[i].bits = static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  }
}

class MpiExchange {
 public:
  MpiExchange(const Case& work, int rank)
      : work_(work),
        rank_(rank),
        input_(work, rank),
        value_bytes_(work.row().value_bytes()),
        scale_bytes_(std::int64_t{work.row().num_scales()} * 4),
        scales_offset_(work.row().scales_offset()),
        pitch_(layout::round_up(work.row().pitch() + sizeof(std::int32_t), 64)),
        num_sent_(std::int64_t{work.num_tokens} * work.topk),
        max_rows_(most_received_rows(work)),
        send_(make_buffer<std::byte>(num_sent_ * pitch_)),
        received_(make_buffer<std::byte>(max_rows_ * pitch_)),
        x_(make_buffer<std::byte>(max_rows_ * value_bytes_)),
        scales_(make_buffer<std::byte>(max_rows_ * scale_bytes_)),
        source_tokens_(make_buffer<std::int32_t>(max_rows_)),
        y_(make_buffer<bfloat16>(max_rows_ * work.hidden)),
        outgoing_(make_buffer<bfloat16>(max_rows_ * work.hidden)),
        returned_(make_buffer<bfloat16>(num_sent_ * work.hidden)),
        out_(make_buffer<bfloat16>(std::int64_t{work.num_tokens} * work.hidden)),
        wire_row_(make_buffer<std::byte>(pitch_)),
        place_(num_sent_),
        send_counts_(work.num_experts),
        received_counts_(work.num_experts),
        cursor_(work.num_experts),
        counts_(work.num_local()),
        sent_rows_(work.num_ranks),
        received_rows_(work.num_ranks) {
    for (auto* list : {&send_bytes_, &send_offsets_, &receive_bytes_, &receive_offsets_}) {
      list->resize(work.num_ranks);
    }
  }

  void dispatch() {
    // Rows for one destination lie together, by expert, then token.
    const int num_local = work_.num_local();
    std::fill(send_counts_.begin(), send_counts_.end(), 0);
    for (const std::int64_t expert : input_.topk_idx) ++send_counts_[expert];
    MPI_Alltoall(send_counts_.data(), num_local, MPI_INT, received_counts_.data(), num_local,
                 MPI_INT, MPI_COMM_WORLD);
    int cursor = 0;
    for (int expert = 0; expert < work_.num_experts; ++expert) {
      cursor_[expert] = cursor;
      cursor += send_counts_[expert];
    }
    for (int peer = 0; peer < work_.num_ranks; ++peer) {
      sent_rows_[peer] = 0;
      received_rows_[peer] = 0;
      for (int local = 0; local < num_local; ++local) {
        sent_rows_[peer] += send_counts_[peer * num_local + local];
        received_rows_[peer] += received_counts_[peer * num_local + local];
      }
    }

    // A token is read, and quantised, once.
    for (int token = 0; token < work_.num_tokens; ++token) {
      const bfloat16* x = input_.x.data() + std::int64_t{token} * work_.hidden;
      const void* row = x;
      std::int64_t row_bytes = value_bytes_;
      if (is_fp8(work_.format)) {
        quantise(x, work_.hidden, reinterpret_cast<std::uint8_t*>(wire_row_.get()),
                 reinterpret_cast<float*>(wire_row_.get() + scales_offset_));
        row = wire_row_.get();
        row_bytes = scales_offset_ + scale_bytes_;
      }
      for (int k = 0; k < work_.topk; ++k) {
        const std::int64_t selection = std::int64_t{token} * work_.topk + k;
        const std::int64_t place = cursor_[input_.topk_idx[selection]]++;
        place_[selection] = place;
        std::byte* target = send_.get() + place * pitch_;
        std::memcpy(target, row, row_bytes);
        const std::int32_t source_token = token;
        std::memcpy(target + pitch_ - sizeof(source_token), &source_token, sizeof(source_token));
      }
    }
    exchange(send_.get(), sent_rows_, received_.get(), received_rows_, pitch_);

    // From order of (source, expert) to order of (expert, source).
    std::int64_t row = 0;
    for (int local = 0; local < num_local; ++local) {
      const std::int64_t first = row;
      std::int64_t source_start = 0;
      for (int source = 0; source < work_.num_ranks; ++source) {
        const int* counts = received_counts_.data() + source * num_local;
        std::int64_t from = source_start;
        for (int before = 0; before < local; ++before) from += counts[before];
        for (int i = 0; i < counts[local]; ++i, ++row, ++from) {
          const std::byte* wire = received_.get() + from * pitch_;
          std::memcpy(x_.get() + row * value_bytes_, wire, value_bytes_);
          if (scale_bytes_ != 0) {
            std::memcpy(scales_.get() + row * scale_bytes_, wire + scales_offset_, scale_bytes_);
          }
          std::memcpy(&source_tokens_[row], wire + pitch_ - sizeof(std::int32_t),
                      sizeof(std::int32_t));
        }
        source_start += received_rows_[source];
      }
      counts_[local] = static_cast<std::int32_t>(row - first);
    }
  }

  void experts() {
    std::int64_t row = 0;
    for (int local = 0; local < work_.num_local(); ++local) {
      for (int i = 0; i < counts_[local]; ++i, ++row) {
        apply_expert(work_, rank_ * work_.num_local() + local, x_.get() + row * value_bytes_,
                     y_.get() + row * work_.hidden);
      }
    }
  }

  void combine() {
    const int num_local = work_.num_local();
    const std::int64_t row_bytes = std::int64_t{work_.hidden} * sizeof(bfloat16);
    std::int64_t row = 0;
    for (int local = 0; local < num_local; ++local) {
      std::int64_t source_start = 0;
      for (int source = 0; source < work_.num_ranks; ++source) {
        const int* counts = received_counts_.data() + source * num_local;
        std::int64_t to = source_start;
        for (int before = 0; before < local; ++before) to += counts[before];
        // Rows of one expert from one source are together on both sides.
        std::memcpy(outgoing_.get() + to * work_.hidden, y_.get() + row * work_.hidden,
                    counts[local] * row_bytes);
        row += counts[local];
        source_start += received_rows_[source];
      }
    }
    exchange(outgoing_.get(), received_rows_, returned_.get(), sent_rows_, row_bytes);

    for (int token = 0; token < work_.num_tokens; ++token) {
      weighted_sum(place_.data() + std::int64_t{token} * work_.topk,
                   input_.topk_weights.data() + std::int64_t{token} * work_.topk,
                   out_.get() + std::int64_t{token} * work_.hidden);
    }
  }

  void check() const {
    struct Row {
      const void* values;
      const void* scales;
      std::int32_t source_token;
    };
    check_received(work_, rank_, counts_.data(), [this](std::int64_t row) {
      return Row{x_.get() + row * value_bytes_, scales_.get() + row * scale_bytes_,
                 source_tokens_[row]};
    });
    check_combined(work_, rank_, out_.get());
  }

 private:
  // One token, in blocks whose sums stay in the first-level cache.
  void weighted_sum(const std::int64_t* place, const float* weights, bfloat16* out) const {
    constexpr int kBlock = 1024;
    alignas(64) float sum[kBlock];
    for (int first = 0; first < work_.hidden; first += kBlock) {
      const int count = std::min(kBlock, work_.hidden - first);
      std::fill_n(sum, count, 0.0F);
      for (int k = 0; k < work_.topk; ++k) {
        accumulate(sum, returned_.get() + place[k] * work_.hidden + first, weights[k], count);
      }
      round_to_bfloat16(out + first, sum, count);
    }
  }

  void exchange(const void* send, const std::vector<std::int64_t>& send_rows, void* receive,
                const std::vector<std::int64_t>& receive_rows, std::int64_t row_bytes) {
    std::int64_t send_offset = 0;
    std::int64_t receive_offset = 0;
    for (int peer = 0; peer < work_.num_ranks; ++peer) {
      send_bytes_[peer] = static_cast<int>(send_rows[peer] * row_bytes);
      send_offsets_[peer] = static_cast<int>(send_offset);
      receive_bytes_[peer] = static_cast<int>(receive_rows[peer] * row_bytes);
      receive_offsets_[peer] = static_cast<int>(receive_offset);
      send_offset += send_bytes_[peer];
      receive_offset += receive_bytes_[peer];
    }
    MPI_Alltoallv(send, send_bytes_.data(), send_offsets_.data(), MPI_BYTE, receive,
                  receive_bytes_.data(), receive_offsets_.data(), MPI_BYTE, MPI_COMM_WORLD);
  }

  Case work_;
  int rank_;
  RankInput input_;
  std::int64_t value_bytes_;
  std::int64_t scale_bytes_;
  std::int64_t scales_offset_;
  std::int64_t pitch_;
  std::int64_t num_sent_;
  std::int64_t max_rows_;
  std::unique_ptr<std::byte[], Free> send_;
  std::unique_ptr<std::byte[], Free> received_;
  std::unique_ptr<std::byte[], Free> x_;
  std::unique_ptr<std::byte[], Free> scales_;
  std::unique_ptr<std::int32_t[], Free> source_tokens_;
  std::unique_ptr<bfloat16[], Free> y_;
  std::unique_ptr<bfloat16[], Free> outgoing_;
  std::unique_ptr<bfloat16[], Free> returned_;
  std::unique_ptr<bfloat16[], Free> out_;
  std::unique_ptr<std::byte[], Free> wire_row_;
  std::vector<std::int64_t> place_;   // [T, K]: row of the send buffer
  std::vector<int> send_counts_;      // [E]
  std::vector<int> received_counts_;  // [R, L]
  std::vector<int> cursor_;           // [E]
  std::vector<std::int32_t> counts_;  // [L]
  std::vector<std::int64_t> sent_rows_;
  std::vector<std::int64_t> received_rows_;
  std::vector<int> send_bytes_;
  std::vector<int> send_offsets_;
  std::vector<int> receive_bytes_;
  std::vector<int> receive_offsets_;
};

// MPI sends within its calls only: what MPI_Alltoallv has returned with may still be in this
// process, and a peer wait for it in vain if the rank went on to wait outside of MPI. Without this,
// OpenMPI over TCP stood still in two of three runs.
void progress() {
  int found = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
}

// The harness's memory belongs to rank 0 and is mapped by all.
SharedArea* allocate_area(int rank, MPI_Win& window) {
  void* memory = nullptr;
  MPI_Win_allocate_shared(rank == 0 ? sizeof(SharedArea) + 128 : 0, 1, MPI_INFO_NULL,
                          MPI_COMM_WORLD, &memory, &window);
  MPI_Aint size = 0;
  int unit = 0;
  MPI_Win_shared_query(window, 0, &size, &unit, &memory);
  // Mapped at different addresses, so the offset that aligns it is rank 0's, told to all.
  int offset = static_cast<int>(-reinterpret_cast<std::intptr_t>(memory) & 127);
  MPI_Bcast(&offset, 1, MPI_INT, 0, MPI_COMM_WORLD);
  auto* area = reinterpret_cast<SharedArea*>(static_cast<std::byte*>(memory) + offset);
  if (rank == 0) std::memset(static_cast<void*>(area), 0, sizeof(SharedArea));
  MPI_Barrier(MPI_COMM_WORLD);
  return area;
}

int run(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("The MPI way of dispatch and combine");
  add_options(app, arguments);
  CLI11_PARSE(app, argc, argv);
  int rank = 0;
  int num_ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);

  MPI_Win window = MPI_WIN_NULL;
  SharedArea* const area =
      arguments.area.empty() ? allocate_area(rank, window) : map_area(arguments.area);

  for (const Case& work : cases(arguments, num_ranks)) {
    MpiExchange exchange(work, rank);
    const Contender contender{.dispatch = [&] { exchange.dispatch(); },
                              .experts = [&] { exchange.experts(); },
                              .combine = [&] { exchange.combine(); },
                              .check = [&] { exchange.check(); },
                              .idle = progress};
    const Timings timings = measure(*area, rank, num_ranks, contender, arguments.seconds);
    if (rank == 0) print_result(work, timings);
  }
  if (window != MPI_WIN_NULL) MPI_Win_free(&window);
  return 0;
}

}  // namespace
}  // namespace tandem::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int result = 1;
  try {
    result = tandem::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_baseline: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return result;
}
