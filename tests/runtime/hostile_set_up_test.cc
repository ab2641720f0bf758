// Peers that do not keep to the protocol while ranks meet and set up: they may make it fail, not
// last longer than the timeout, and not give this rank memory that is not as it should be.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <functional>

#include "runtime/agreement.h"
#include "runtime/launch.h"
#include "runtime/raw_socket.h"
#include "runtime/socket_bootstrap.h"
#include "runtime/symmetric_memory.h"
#include "support/fake_bootstrap.h"

namespace tandem::runtime {
namespace {

using std::chrono::milliseconds;

FrameHeader header_of(FrameKind kind, std::uint64_t length) {
  return {.magic = kFrameMagic,
          .kind = kind,
          .exchange = static_cast<std::uint32_t>(Exchange::kMessages),
          .rank = 0,
          .round = 1,
          .deadline_ns = Deadline::never().nanoseconds(),
          .length = length};
}

// What `rank` of two gets of a peer that goes on talking, at most a few seconds, until rank is
// done. `talk` sends its next words. Did rank wait for the peer to fall silent?
struct Heard {
  std::optional<Error> error;
  bool peer_was_still_talking = false;
};
Heard listen_to(int rank, const std::function<void(int fd)>& talk) {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor peer(ends[1]);
  std::vector<Channel> channels(rank == 0 ? 2 : 1);
  channels.back() = Channel(Descriptor(ends[0]));
  SocketBootstrap bootstrap(rank, 2, milliseconds(30'000), std::move(channels));
  std::atomic<bool> over = false;
  Heard outcome;
  std::thread talker([&] {
    for (int word = 0; word < 10'000 && !over; ++word) {
      talk(peer.get());
      std::this_thread::sleep_for(milliseconds(1));
    }
    outcome.peer_was_still_talking = over;
  });
  outcome.error = error_of([&] { static_cast<void>(bootstrap.all_gather({})); });
  over = true;
  talker.join();
  return outcome;
}

TEST(HostileSetUp, ThatSaysAgainAndAgainThatItIsThereIsOutOfTurn) {
  const Heard outcome = listen_to(1, [](int fd) {
    const FrameHeader entered = header_of(FrameKind::kEntered, 0);
    static_cast<void>(send(fd, &entered, sizeof entered, MSG_NOSIGNAL));
  });
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code(), ErrorCode::kPeerLost) << outcome.error->what();
  EXPECT_TRUE(outcome.peer_was_still_talking);
}

TEST(HostileSetUp, StrangersWithoutEndDoNotKeepRankZeroFromItsTimeout) {
  const std::string name = unique_name();
  std::atomic<bool> over = false;
  bool still_coming = false;
  std::thread strangers([&] {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!over && std::chrono::steady_clock::now() < limit) {
      static_cast<void>(try_connect_raw(name));
    }
    still_coming = over;
  });
  const auto outcomes = connect_all(name, {{.rank = 0, .size = 2, .timeout = milliseconds(50)}});
  over = true;
  strangers.join();
  EXPECT_TRUE(still_coming);
  expect_error(outcomes[0], ErrorCode::kTimeout, 1, {"rank 1 of 2"});
}

TEST(HostileSetUp, ADeadlineFromBeforeTheClockBeganHasPassed) {
  for (const std::int64_t nanoseconds : {INT64_MIN, INT64_MIN + 1, std::int64_t{-1}}) {
    const Deadline deadline =
        Deadline::after(milliseconds(60'000)).earlier_of(Deadline::from_nanoseconds(nanoseconds));
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(deadline.poll_timeout(), 0);
  }
}

// Set-up in which a peer's part of some exchange is not what it should be.
class OddPeer : public test::FakeBootstrap {
 public:
  OddPeer() : FakeBootstrap(0, 2) {}
  [[nodiscard]] bool in_one_process() const override { return false; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) override {
    auto all = FakeBootstrap::all_gather(message);
    if (!message_.empty()) all[1] = message_;
    return all;
  }
  [[nodiscard]] std::vector<Descriptor> all_gather_descriptors(const Descriptor& own) override {
    struct stat status {};
    EXPECT_EQ(fstat(own.get(), &status), 0);
    EXPECT_EQ(status.st_nlink, 0U) << "a name that others can open";
    EXPECT_EQ(fcntl(own.get(), F_GET_SEALS) & kSeals, kSeals);
    EXPECT_NE(fcntl(own.get(), F_GETFD) & FD_CLOEXEC, 0);
    std::vector<Descriptor> all;
    all.emplace_back(fcntl(own.get(), F_DUPFD_CLOEXEC, 0));
    all.push_back(std::move(descriptor_));
    return all;
  }

  static constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  std::vector<std::byte> message_;
  Descriptor descriptor_;
};

Descriptor memory_file(std::int64_t size_bytes, int seals) {
  Descriptor file(memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(file.get(), size_bytes), 0);
  EXPECT_EQ(fcntl(file.get(), F_ADD_SEALS, seals), 0);
  return file;
}

TEST(HostileSetUp, MemoryThatCouldShrinkOrIsTooShortIsNotMapped) {
  constexpr std::int64_t kBytes = 8192;
  const auto refused = [](Descriptor descriptor) {
    OddPeer bootstrap;
    bootstrap.descriptor_ = std::move(descriptor);
    const auto error = error_of([&] { const SymmetricMemory memory(bootstrap, kBytes); });
    return error && error->code() == ErrorCode::kMismatch && error->peer() == 1;
  };
  EXPECT_TRUE(refused(memory_file(kBytes, 0)));
  EXPECT_TRUE(refused(memory_file(kBytes, F_SEAL_GROW | F_SEAL_SEAL)));
  EXPECT_TRUE(refused(memory_file(kBytes - 1, OddPeer::kSeals)));
  EXPECT_TRUE(refused(memory_file(2 * kBytes, OddPeer::kSeals)));
  EXPECT_TRUE(refused(Descriptor(open("/dev/zero", O_RDWR | O_CLOEXEC))));
  OddPeer bootstrap;
  bootstrap.descriptor_ = memory_file(kBytes, OddPeer::kSeals);
  EXPECT_FALSE(error_of([&] { const SymmetricMemory memory(bootstrap, kBytes); }));
}

TEST(HostileSetUp, AFailureThatNobodyCanHaveWrittenIsAMismatch) {
  for (const std::size_t length : {std::size_t{1}, std::size_t{48}, std::size_t{100}}) {
    OddPeer bootstrap;
    bootstrap.message_.assign(length, std::byte{0xee});
    const auto error = error_of([&] { static_cast<void>(agree(bootstrap, [] { return 1; })); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kMismatch) << error->what();
    EXPECT_EQ(error->peer(), 1);
  }
}

}  // namespace
}  // namespace tandem::runtime
