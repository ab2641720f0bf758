#include "faults/newcomer.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "runtime/buffer_state.h"

namespace tandem::test {

using namespace std::chrono_literals;

Gathering::Gathering(std::chrono::nanoseconds timeout) : options(options_for(shape)) {
  static int number = 0;
  name = "newcomer_" + std::to_string(::getpid()) + '_' + std::to_string(number++);
  options.on_timeout = OnTimeout::kMask;
  options.timeout = timeout;
  options.first_epoch = 0xfffffff0U;  // the wrap falls into the middle
  options.door = name;
  options.max_ranks = kMembers + 1;
}

Buffer make_member(const Gathering& gathering, int rank, Script& script) {
  return Buffer(std::make_shared<runtime::BufferState>(
      Communicator::connect(gathering.name, rank, kMembers), gathering.options, &script));
}

Buffer join(const Gathering& gathering, int rank, Script& script) {
  for (const auto start = std::chrono::steady_clock::now();;) {
    try {
      return Buffer(std::make_shared<runtime::BufferState>(rank, gathering.options, &script));
    } catch (const Error& error) {
      // The predecessor is still there, or nobody has let this one in yet.
      const bool is_early =
          error.code() == ErrorCode::kOrder || error.code() == ErrorCode::kTimeout;
      const bool is_late = std::chrono::steady_clock::now() - start > 30s;
      if (!is_early || is_late || gathering.common.is_open(kStarved)) throw;
      std::this_thread::sleep_for(1ms);
    }
  }
}

namespace {

void let_in_who_waits(Rank& rank, Buffer& buffer) {
  const Present active = buffer.active();
  if (std::find(active.begin(), active.end(), true) - active.begin() != buffer.rank()) return;
  for (const int waiting : buffer.waiting()) {
    try {
      buffer.unmask(waiting);
    } catch (const Error& error) {
      rank.expect(error.code() == ErrorCode::kOrder, error.what());  // it has gone again
    }
  }
}

}  // namespace

void run_until(Rank& rank, Buffer& buffer, const Gathering& gathering, const Present& wanted,
               const std::function<bool(const Present&)>& after) {
  Party party(rank, gathering.oracles, buffer);
  const auto start = std::chrono::steady_clock::now();
  bool is_masked = false;
  int pairs = 0;
  std::string last;  // error
  for (int together = 0; together < kPairsTogether;) {
    if (std::chrono::steady_clock::now() - start > 40s) {
      return rank.fail("they do not gather; " + std::to_string(pairs) +
                       " pairs, last error: " + last);
    }
    try {
      if (is_masked) static_cast<void>(buffer.recover());
      is_masked = false;
      let_in_who_waits(rank, buffer);
      const Present present = party.run(buffer);
      ++pairs;
      together += present == wanted ? 1 : 0;
      if (!after(present)) return;
    } catch (const Error& error) {
      const bool is_timeout = error.code() == ErrorCode::kTimeout;
      const bool is_expected = error.code() == ErrorCode::kMasked || (is_masked && is_timeout);
      if (is_timeout && error.peer() >= 0 && !after(all_but(buffer.num_ranks(), {error.peer()})))
        return;
      if (!rank.expect(is_expected, error.what())) return;
      is_masked = true;
      last = error.what();
      if (!after(wanted)) return;
    }
  }
}

}  // namespace tandem::test
