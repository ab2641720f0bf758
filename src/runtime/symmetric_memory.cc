// Blocks of host memory that all ranks map. Every step that may fail on one rank is followed by an
// agreement, so that all ranks throw the same error or none does.
#include "runtime/symmetric_memory.h"

#include <sys/resource.h>

#include <cstring>
#include <optional>
#include <string>

#include "runtime/agreement.h"
#include "runtime/memory_file.h"
#include "runtime/memory_limit.h"

namespace tandem::runtime {
namespace {

Failure refusal(int rank, std::int64_t size_bytes, const std::string& why) {
  Failure failure =
      setup_failure(ErrorCode::kResource, rank,
                    "rank " + std::to_string(rank) + " cannot have " + std::to_string(size_bytes) +
                        " bytes of symmetric memory: " + why);
  return failure;
}

// Why a block of this size can never be had here, if so.
std::optional<Failure> check_size(int rank, std::int64_t size_bytes) {
  if (size_bytes <= 0) {
    return setup_failure(ErrorCode::kInvalidArgument, rank,
                         "rank " + std::to_string(rank) + " asks for " +
                             std::to_string(size_bytes) + " bytes of symmetric memory");
  }
  const MemoryLimit limit = memory_limit();
  if (size_bytes > limit.bytes) {
    Failure failure = refusal(
        rank, size_bytes, std::to_string(limit.bytes) + " bytes available (" + limit.what + ")");
    failure.info.expected = size_bytes;
    failure.info.seen = limit.bytes;
    return failure;
  }
  // Beyond this limit ftruncate would end the process with SIGXFSZ.
  rlimit files{};
  if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY &&
      static_cast<std::uint64_t>(size_bytes) > files.rlim_cur) {
    return refusal(rank, size_bytes,
                   std::to_string(files.rlim_cur) + " bytes available (ulimit -f)");
  }
  return {};
}

void check_equal_sizes(Bootstrap& bootstrap, std::int64_t size_bytes) {
  const auto sizes = bootstrap.all_gather(std::as_bytes(std::span(&size_bytes, 1)));
  std::int64_t first = 0;
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    std::int64_t size = -1;
    if (sizes[rank].size() == sizeof size) std::memcpy(&size, sizes[rank].data(), sizeof size);
    if (rank == 0) first = size;
    if (size == first) continue;
    Failure failure =
        setup_failure(ErrorCode::kMismatch, rank,
                      "rank " + std::to_string(rank) + " asks for " + std::to_string(size) +
                          " bytes of symmetric memory, rank 0 for " + std::to_string(first));
    failure.info.expected = first;
    failure.info.seen = size;
    failure.raise();
  }
}

// The block of `rank`, or why `own_rank` has none.
struct Block {
  std::shared_ptr<std::byte> memory;
  std::optional<Failure> failure;
};

Block map_block(int own_rank, int rank, const Descriptor& file, std::int64_t size_bytes) {
  if (!is_memory_file(file, size_bytes)) {
    return {.memory = nullptr,
            .failure = setup_failure(ErrorCode::kMismatch, rank,
                                     "rank " + std::to_string(rank) +
                                         " sent a descriptor that is no sealed block of " +
                                         std::to_string(size_bytes) + " bytes")};
  }
  Mapping mapping = map_shared(file, size_bytes);
  if (mapping.problem.empty()) return {.memory = std::move(mapping.memory), .failure = {}};
  return {.memory = nullptr,
          .failure = refusal(
              own_rank, size_bytes,
              "mapping the block of rank " + std::to_string(rank) + ", " + mapping.problem)};
}

}  // namespace

SymmetricMemory::SymmetricMemory(Bootstrap& bootstrap, std::int64_t size_bytes, Kind kind)
    : rank_(bootstrap.rank()), size_bytes_(size_bytes) {
  const int rank = rank_;
  Bootstrap& host = bootstrap.host();
  const std::vector<int> host_ranks = bootstrap.host_ranks();
  const bool threads = host.in_one_process();
  check_equal_sizes(bootstrap, size_bytes);
  std::optional<Failure> failure = check_size(rank, size_bytes);
  Mapping own;
  const auto check = [&](const std::string& problem) {
    if (!failure && !problem.empty()) failure = refusal(rank, size_bytes, problem);
  };
  if (!failure && (!threads || kind == Kind::kAlwaysFile)) {
    MemoryFile file = make_memory_file("tandem", size_bytes);
    check(file.problem);
    file_ = std::move(file.descriptor);
  }
  if (!failure && threads) {
    own = file_ ? map_shared(file_, size_bytes) : map_private(size_bytes);
    check(own.problem);
  }
  agree(bootstrap, failure);

  blocks_.resize(static_cast<std::size_t>(bootstrap.size()));
  std::vector<Descriptor> files;
  if (threads) {
    auto objects = host.all_gather_objects(own.memory);
    for (std::size_t i = 0; i < objects.size(); ++i) {
      blocks_[host_ranks[i]] = std::static_pointer_cast<std::byte>(std::move(objects[i]));
    }
  } else {
    files = host.all_gather_descriptors(file_);
  }
  for (std::size_t i = 0; i < files.size() && !failure; ++i) {
    Block block = map_block(rank, host_ranks[i], files[i], size_bytes);
    failure = std::move(block.failure);
    blocks_[host_ranks[i]] = std::move(block.memory);
  }
  agree(bootstrap, failure);
}

SymmetricMemory::SymmetricMemory(int rank, int num_ranks, std::int64_t size_bytes)
    : rank_(rank), size_bytes_(size_bytes), blocks_(static_cast<std::size_t>(num_ranks)) {
  if (const std::optional<Failure> failure = check_size(rank, size_bytes)) failure->raise();
  MemoryFile file = make_memory_file("tandem", size_bytes);
  if (!file.problem.empty()) refusal(rank, size_bytes, file.problem).raise();
  file_ = std::move(file.descriptor);
  set_block(rank, file_);
}

void SymmetricMemory::make_room(int num_ranks) {
  blocks_.resize(static_cast<std::size_t>(num_ranks));
}

void SymmetricMemory::set_block(int rank, const Descriptor& file) {
  Block block = map_block(rank_, rank, file, size_bytes_);
  if (block.failure) block.failure->raise();
  blocks_[rank] = std::move(block.memory);
}

}  // namespace tandem::runtime
