// Blocks of host memory that all ranks map. Every step that may fail on one rank is followed by an
// agreement, so that all ranks throw the same error or none does.
#include "runtime/symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "runtime/agreement.h"
#include "runtime/memory_limit.h"

namespace tandem::runtime {
namespace {

// Peers may rely on the file to stay as long as it is: a truncated mapping would end in SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A mapping, or why there is none.
struct Mapping {
  std::shared_ptr<std::byte> memory;
  std::string problem;
};

Mapping map(std::int64_t size_bytes, int flags, int fd) {
  const auto size = static_cast<std::size_t>(size_bytes);
  void* const address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) {
    return {.memory = nullptr, .problem = std::string("mmap: ") + std::strerror(errno)};
  }
  // Where the system offers large pages, fewer of them cover the rows. Only a wish.
  ::madvise(address, size, MADV_HUGEPAGE);
  return {
      .memory = std::shared_ptr<std::byte>(static_cast<std::byte*>(address),
                                           [size](std::byte* mapped) { ::munmap(mapped, size); }),
      .problem = {}};
}

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

// A sealed, nameless file of zeros.
struct File {
  Descriptor descriptor;
  std::string problem;
};

File make_file(std::int64_t size_bytes) {
  File file{.descriptor = Descriptor(::memfd_create("tandem", MFD_CLOEXEC | MFD_ALLOW_SEALING)),
            .problem = {}};
  const auto failed = [&file](const char* call) {
    file.problem = std::string(call) + ": " + std::strerror(errno);
    file.descriptor.reset();
    return std::move(file);
  };
  if (!file.descriptor) return failed("memfd_create");
  if (::ftruncate(file.descriptor.get(), size_bytes) != 0) return failed("ftruncate");
  if (::fcntl(file.descriptor.get(), F_ADD_SEALS, kSeals) != 0) return failed("sealing");
  return file;
}

// Does a peer's descriptor carry what it should?
bool is_block(int fd, std::int64_t size_bytes) {
  struct stat status {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return ::fstat(fd, &status) == 0 && status.st_size == size_bytes && seals >= 0 &&
         (seals & kSeals) == kSeals;
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

}  // namespace

SymmetricMemory::SymmetricMemory(Bootstrap& bootstrap, std::int64_t size_bytes)
    : size_bytes_(size_bytes) {
  const int rank = bootstrap.rank();
  check_equal_sizes(bootstrap, size_bytes);
  std::optional<Failure> failure = check_size(rank, size_bytes);

  Mapping own;
  File file;
  if (!failure && bootstrap.in_one_process()) {
    own = map(size_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!own.problem.empty()) failure = refusal(rank, size_bytes, own.problem);
  } else if (!failure) {
    file = make_file(size_bytes);
    if (!file.problem.empty()) failure = refusal(rank, size_bytes, file.problem);
  }
  agree(bootstrap, failure);

  blocks_.reserve(static_cast<std::size_t>(bootstrap.size()));
  if (bootstrap.in_one_process()) {
    for (auto& block : bootstrap.all_gather_objects(own.memory)) {
      blocks_.push_back(std::static_pointer_cast<std::byte>(std::move(block)));
    }
    return;
  }
  const std::vector<Descriptor> files = bootstrap.all_gather_descriptors(file.descriptor);
  for (int peer = 0; peer < bootstrap.size() && !failure; ++peer) {
    if (!is_block(files[peer].get(), size_bytes)) {
      failure = setup_failure(ErrorCode::kMismatch, peer,
                              "rank " + std::to_string(peer) +
                                  " sent a descriptor that is no sealed block of " +
                                  std::to_string(size_bytes) + " bytes");
      break;
    }
    Mapping mapping = map(size_bytes, MAP_SHARED, files[peer].get());
    if (!mapping.problem.empty()) {
      failure =
          refusal(rank, size_bytes,
                  "mapping the block of rank " + std::to_string(peer) + ", " + mapping.problem);
    }
    blocks_.push_back(std::move(mapping.memory));
  }
  agree(bootstrap, failure);
}

}  // namespace tandem::runtime
