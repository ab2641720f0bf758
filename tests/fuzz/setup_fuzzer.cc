// Making a buffer where peers answer the exchanges of set-up with anything: sizes, options,
// failures, descriptors. It is made or refused with a tandem::Error; then it is as sound as if all
// had answered well.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <string>

#include "fuzz/check.h"
#include "runtime/failure.h"
#include "runtime/host_identity.h"
#include "support/fake_bootstrap.h"
#include "tandem/buffer.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;
using runtime::Descriptor;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* const first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

bool is_known(ErrorCode code) { return name(code) != "unknown"; }

class HostileBootstrap final : public test::FakeBootstrap {
 public:
  HostileBootstrap(int rank, int size, FuzzedDataProvider& data)
      : FakeBootstrap(rank, size), data_(&data) {}

  [[nodiscard]] bool in_one_process() const override { return false; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override {
    auto all = FakeBootstrap::all_gather(message);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) distort(all[peer]);
    }
    return all;
  }

  [[nodiscard]] std::vector<Descriptor> all_gather_descriptors(const Descriptor& own) override {
    struct stat status {};
    check(::fstat(own.get(), &status) == 0, "an own descriptor is given");
    check(status.st_nlink == 0, "memory has no name");
    check((::fcntl(own.get(), F_GET_SEALS) & F_SEAL_SHRINK) != 0, "memory is sealed");
    std::vector<Descriptor> all;
    for (int peer = 0; peer < size(); ++peer) {
      all.push_back(peer == rank() ? Descriptor(::fcntl(own.get(), F_DUPFD_CLOEXEC, 0))
                                   : some_descriptor(status.st_size));
    }
    return all;
  }

 private:
  void distort(std::vector<std::byte>& message) {
    switch (data_->ConsumeIntegralInRange(0, 15)) {
      case 0:
        message = bytes_of(data_->ConsumeRandomLengthString(80));
        break;
      case 1:
        message.resize(data_->ConsumeIntegralInRange<std::size_t>(0, message.size()));
        break;
      case 2:
        if (!message.empty()) {
          message[data_->ConsumeIntegralInRange<std::size_t>(0, message.size() - 1)] =
              static_cast<std::byte>(data_->ConsumeIntegral<std::uint8_t>());
        }
        break;
      case 3: {
        message = runtime::encode(runtime::setup_failure(ErrorCode::kResource, 1, "no memory"));
        message[data_->ConsumeIntegralInRange<std::size_t>(0, message.size() - 1)] =
            static_cast<std::byte>(data_->ConsumeIntegral<std::uint8_t>());
        break;
      }
      default:
        break;
    }
  }

  Descriptor some_descriptor(std::int64_t size_bytes) {
    constexpr int kRight = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (data_->ConsumeIntegralInRange(0, 15) == 0) {
      return Descriptor(::open("/dev/zero", O_RDWR | O_CLOEXEC));
    }
    Descriptor file(::memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const std::int64_t sizes[] = {size_bytes, size_bytes,     size_bytes,
                                  0,          size_bytes - 1, size_bytes + 4096};
    check(::ftruncate(file.get(), data_->PickValueInArray(sizes)) == 0, "a file can have a size");
    const int seals[] = {kRight, kRight, kRight | F_SEAL_WRITE, 0, F_SEAL_GROW};
    check(::fcntl(file.get(), F_ADD_SEALS, data_->PickValueInArray(seals)) == 0,
          "a file can be sealed");
    return file;
  }

  FuzzedDataProvider* data_;
};

void make_buffer(FuzzedDataProvider& data) {
  const int size = data.ConsumeIntegralInRange(2, 4);
  const int rank = data.ConsumeIntegralInRange(0, size - 1);
  const BufferOptions options{.num_experts = data.ConsumeIntegralInRange(1, 6),
                              .max_tokens = 2,
                              .max_hidden = 8,
                              .max_topk = 2};
  const auto bootstrap = std::make_shared<HostileBootstrap>(rank, size, data);
  try {
    const Buffer buffer(Communicator(bootstrap), options);
    check(buffer.num_ranks() == size && buffer.rank() == rank, "a buffer is as it was asked for");
  } catch (const Error& error) {
    check(is_known(error.code()), "an error has a code that exists");
  }
}

void introduce(FuzzedDataProvider& data) {
  const int size = data.ConsumeIntegralInRange(1, 3);
  const auto gather = [&](std::span<const std::byte> own) {
    std::vector<std::vector<std::byte>> all;
    const int num_messages = data.ConsumeBool() ? size : data.ConsumeIntegralInRange(0, 5);
    for (int i = 0; i < num_messages; ++i) {
      if (data.ConsumeBool()) {
        all.emplace_back(own.begin(), own.end());
      } else {
        all.push_back(bytes_of("tandem " + data.ConsumeRandomLengthString(80)));
      }
    }
    return all;
  };
  try {
    const auto introductions = runtime::introduce(0, size, gather, true);
    check(introductions.size() == static_cast<std::size_t>(size), "every rank has said who it is");
    for (const int rank : runtime::ranks_on_host_of(0, introductions)) {
      check(rank >= 0 && rank < size, "ranks on a host are ranks");
    }
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  if (data.ConsumeIntegralInRange(0, 3) > 0) {
    make_buffer(data);
  } else {
    introduce(data);
  }
  const std::string rest = data.ConsumeRemainingBytesAsString();
  if (const auto failure = runtime::decode_failure(bytes_of(rest))) {
    try {
      failure->raise();
    } catch (const Error& error) {
      check(is_known(error.code()), "a decoded failure has a code that exists");
    }
  }
  return 0;
}
