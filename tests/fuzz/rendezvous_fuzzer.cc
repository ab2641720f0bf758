// The rendezvous: rank 0 to which strangers of its own user come, and a rank whose rank 0, or the
// door that it is let in by, is anything. Meeting ends with a communicator or a tandem::Error.
#include <thread>

#include "fuzz/frames.h"
#include "runtime/door.h"
#include "runtime/raw_socket.h"
#include "runtime/socket_bootstrap.h"

namespace {

using namespace tandem;  // NOLINT
using fuzz::check;
using runtime::Descriptor;
using runtime::FrameKind;

constexpr std::chrono::milliseconds kTimeout{10};

std::string hello(FuzzedDataProvider& data, int size) {
  std::int32_t words[4] = {runtime::kProtocolVersion, data.ConsumeIntegralInRange(0, size), size,
                           0};
  if (data.ConsumeIntegralInRange(0, 3) == 0) {
    std::int32_t& word = words[data.ConsumeIntegralInRange(0, 3)];
    word = fuzz::awkward(data, word);
  }
  std::string payload(reinterpret_cast<const char*>(words), sizeof words);
  if (data.ConsumeIntegralInRange(0, 7) == 0) {
    payload.resize(data.ConsumeIntegralInRange<std::size_t>(0, 20));
  }
  return payload;
}

runtime::FrameHeader header_of(FrameKind kind) {
  return {.magic = 0,
          .kind = kind,
          .exchange = 0,
          .rank = 0,
          .round = 0,
          .deadline_ns = runtime::Deadline::after(kTimeout).nanoseconds(),
          .length = 0};
}

void meet(const std::string& name, int rank, int size) {
  try {
    const auto bootstrap = runtime::connect_by_name(name, rank, size, kTimeout);
    check(bootstrap->rank() == rank && bootstrap->size() == size, "the rank that it asked for");
  } catch (const Error&) {
  }
}

// Strangers come, say something and hang up or stay; rank 0 listens in a thread of its own.
void as_strangers(FuzzedDataProvider& data, const std::string& name) {
  const int size = data.ConsumeIntegralInRange(2, 3);
  std::thread root([&] { meet(name, 0, size); });
  std::vector<Descriptor> strangers;
  const int num_strangers = data.ConsumeIntegralInRange(1, 4);
  for (int i = 0; i < num_strangers; ++i) {
    Descriptor stranger = runtime::try_connect_raw(name);
    for (int attempt = 0; attempt < 100 && !stranger; ++attempt) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      stranger = runtime::try_connect_raw(name);
    }
    if (!stranger) break;  // it has failed already
    const int num_frames = data.ConsumeIntegralInRange(0, 2);
    for (int frame = 0; frame < num_frames; ++frame) {
      const auto kind =
          data.ConsumeIntegralInRange(0, 5) == 0 ? FrameKind::kFailure : FrameKind::kHello;
      fuzz::send_bytes(stranger.get(), fuzz::frame(data, header_of(kind), hello(data, size)),
                       data.ConsumeIntegralInRange(0, 9) == 0 ? 2 : 0);
    }
    if (data.ConsumeBool()) strangers.push_back(std::move(stranger));
  }
  // The others hang up, so that rank 0 need not wait for its deadline.
  for (Descriptor& stranger : strangers) ::shutdown(stranger.get(), SHUT_RDWR);
  root.join();
}

// A rank 0 of another make: it accepts one rank, answers anything and hangs up.
void as_root(FuzzedDataProvider& data, const std::string& name) {
  const runtime::RawAddress address(name);
  const Descriptor listener = runtime::raw_socket();
  check(::bind(listener.get(), address.get(), address.length) == 0, "the name is free");
  check(::listen(listener.get(), 8) == 0, "there is a listener");
  std::string answers;
  const int num_frames = data.ConsumeIntegralInRange(0, 3);
  for (int frame = 0; frame < num_frames; ++frame) {
    const FrameKind kinds[] = {FrameKind::kAccepted, FrameKind::kWelcome, FrameKind::kFailure};
    const FrameKind kind = kinds[std::min(frame, data.ConsumeIntegralInRange(0, 2))];
    std::string payload;
    if (kind == FrameKind::kWelcome) {
      // Not an address, which only this process could mean: it would be taken for one.
      payload.assign(data.ConsumeBool() ? sizeof(std::uint64_t)
                                        : data.ConsumeIntegralInRange<std::size_t>(0, 16),
                     '\0');
    } else if (kind == FrameKind::kFailure) {
      payload = "more than a pointer" + data.ConsumeRandomLengthString(80);
    }
    answers += fuzz::frame(data, header_of(kind), payload);
  }
  std::thread root([&] {
    const Descriptor member(::accept(listener.get(), nullptr, nullptr));
    fuzz::send_bytes(member.get(), answers, 0);
    ::shutdown(member.get(), SHUT_RDWR);
    ::shutdown(listener.get(), SHUT_RDWR);
  });
  meet(name, 1, 2);
  root.join();
}

// A door (runtime/door.h) behind which is anything: it hands out what it likes and hangs up.
void as_door(FuzzedDataProvider& data, const std::string& name) {
  const runtime::RawAddress address(name + "/door/1");
  const Descriptor listener = runtime::raw_socket();
  check(::bind(listener.get(), address.get(), address.length) == 0, "the name is free");
  check(::listen(listener.get(), 8) == 0, "there is a listener");
  struct Answer {
    std::string bytes;
    int num_descriptors;
  };
  std::vector<Answer> answers;
  for (const FrameKind kind : {FrameKind::kOffer, FrameKind::kBoard}) {
    runtime::FrameHeader header = header_of(kind);
    header.round = runtime::kProtocolVersion;
    header.rank = 2;
    answers.push_back(
        {fuzz::frame(data, header, data.ConsumeRandomLengthString(80)),
         data.ConsumeIntegralInRange(0, 7) > 0 ? 1 : data.ConsumeIntegralInRange(0, 3)});
  }
  std::thread door([&] {
    const Descriptor visitor(::accept(listener.get(), nullptr, nullptr));
    for (const Answer& answer : answers) {
      fuzz::send_bytes(visitor.get(), answer.bytes, answer.num_descriptors);
    }
    ::shutdown(visitor.get(), SHUT_RDWR);
  });
  try {
    const auto offer = runtime::visit_door(name, 1, kTimeout);
    check(!offer || (offer->num_ranks >= 1 && offer->block && offer->board), "an offer is whole");
  } catch (const Error&) {
  }
  door.join();
}

}  // namespace

// Rank 0 hands ranks of its own process, which strangers here are, a pointer with their welcome:
// theirs to delete, had they been ranks.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  FuzzedDataProvider data(bytes, size);
  static int num_runs = 0;
  const std::string name = "fuzz-" + std::to_string(::getpid()) + "-" + std::to_string(num_runs++);
  switch (data.ConsumeIntegralInRange(0, 2)) {
    case 0:
      as_strangers(data, name);
      break;
    case 1:
      as_root(data, name);
      break;
    default:
      as_door(data, name);
  }
  return 0;
}
