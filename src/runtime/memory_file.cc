// Pieces of memory that processes share: sealed, nameless files of zeros, mapped.
#include "runtime/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace tandem::runtime {
namespace {

// Peers may rely on the file to stay as long as it is: a truncated mapping would end in SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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

// What this process has mapped, by the numbers of device and file, which stay the file's own for as
// long as it is mapped.
class MappedFiles {
 public:
  Mapping map(const Descriptor& file, std::int64_t size_bytes) {
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) {
      return {.memory = nullptr, .problem = std::string("fstat: ") + std::strerror(errno)};
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(mapped_, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<std::byte>& known = mapped_[{status.st_dev, status.st_ino}];
    if (auto memory = known.lock()) return {.memory = std::move(memory), .problem = {}};
    Mapping mapping = runtime::map(size_bytes, MAP_SHARED, file.get());
    known = mapping.memory;
    return mapping;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<std::byte>> mapped_;
};

}  // namespace

Mapping map_private(std::int64_t size_bytes) {
  return map(size_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

Mapping map_shared(const Descriptor& file, std::int64_t size_bytes) {
  static MappedFiles files;
  return files.map(file, size_bytes);
}

MemoryFile make_memory_file(const char* name, std::int64_t size_bytes) {
  MemoryFile file{.descriptor = Descriptor(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)),
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

bool is_memory_file(const Descriptor& file, std::int64_t size_bytes) {
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  return ::fstat(file.get(), &status) == 0 && status.st_size == size_bytes && seals >= 0 &&
         (seals & kSeals) == kSeals;
}

}  // namespace tandem::runtime
