#include "soak/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "soak/judge.h"
#include "soak/menace.h"

namespace tandem::tools {

namespace {

class Session {
 public:
  Session(const SessionPlan& plan, Ledger& ledger, Buffer& buffer, const ReportFunction& report)
      : plan_(plan),
        ledger_(ledger),
        self_(ledger.ranks[buffer.rank()]),
        report_(report),
        memory_(plan.options.backend),
        buffer_(buffer),
        judge_(memory_, buffer.rank()),
        before_(static_cast<std::size_t>(buffer.num_ranks()), true) {}

  void run(std::int64_t first) {
    const auto start = std::chrono::steady_clock::now();
    std::optional<Menace> menace;
    if (plan_.options.faults && buffer_.rank() == 0) menace.emplace(plan_, ledger_);
    for (std::int64_t pair = first; goes_on(pair); ++pair) {
      try {
        if (is_first_of_those_present()) {
          // Nobody is further than the operation after the next.
          if (ledger_.last_pair < 0 && std::chrono::steady_clock::now() - start > plan_.duration) {
            ledger_.last_pair = pair + 2;
          }
          let_others_in(pair);
        }
        run_pair(plan_.at(pair));
      } catch (const Error& error) {
        if (!survives(error)) break;
        if (!come_back()) break;
        pair = self_.joins_at - 1;
      }
    }
    ledger_.over = true;
  }

 private:
  [[nodiscard]] bool goes_on(std::int64_t pair) const {
    const std::int64_t last = ledger_.last_pair;
    return !failed_ && (last < 0 || pair <= last);
  }

  [[nodiscard]] bool is_first_of_those_present() const {
    const Present active = buffer_.active();
    return std::find(active.begin(), active.end(), true) - active.begin() == buffer_.rank();
  }

  void let_others_in(std::int64_t pair) {
    if (!goes_on(pair + 1)) return;
    for (const int rank : buffer_.waiting()) {
      ledger_.ranks[rank].joins_at = pair + 1;
      try {
        buffer_.unmask(rank);
        ++ledger_.returned;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kOrder) throw;  // it has gone again
      }
    }
  }

  void fail(const std::string& what) {
    failed_ = true;
    ++ledger_.unexpected_errors;
    report_({{"failure", what}});
  }

  // Is this what faults have to lead to, and can this rank come back after it?
  bool survives(const Error& error) {
    const bool was_late = error.code() == ErrorCode::kMasked && self_.faulted;
    // Who was stopped in the middle of a copy may go on with it: no operation until it has. So the
    // session ends.
    const bool is_blocked = error.code() == ErrorCode::kTimeout &&
                            error.info().phase == Phase::kMembership && plan_.options.faults;
    if (was_late || is_blocked) {
      ++ledger_.expected_errors;
    } else {
      fail(error.what());
    }
    return was_late;
  }

  bool come_back() {
    while (!ledger_.over) {
      try {
        buffer_.recover();
        return true;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kTimeout) {  // nobody has let it in yet
          fail(error.what());
          return false;
        }
      }
    }
    return false;
  }

  // Between calls: what the menace has in store for a thread.
  void suffer() {
    if (self_.must_leave) throw Left{};
    std::this_thread::sleep_for(std::chrono::milliseconds(self_.nap_ms.exchange(0)));
  }

  // Who took part by the handle, if it is as it may be.
  Present present(const DispatchHandle& handle) {
    Present present = handle.active();
    for (std::size_t rank = 0; rank < present.size(); ++rank) {
      if (!present[rank] && before_[rank] && !ledger_.ranks[rank].faulted) {
        fail(fmt::format("rank {} was missed, though nothing had been done to it", rank));
      }
    }
    return present;
  }

  void run_pair(const SoakCase& one) {
    suffer();
    const Present active = buffer_.active();
    Operation operation(buffer_, memory_, one.combination, one.inputs);
    const int round = static_cast<int>(pairs_++ % kNumRounds);
    operation.dispatch(round);
    suffer();
    const DispatchResult& received = operation.received(round);
    received.hook();
    operation.settle();
    const Present received_by = present(received.handle);
    std::string why;
    const Outcome* const outcome =
        judge_.received(one, received, received_by, {before_, active}, why);
    if (outcome == nullptr) return fail("dispatch: " + why);
    suffer();
    operation.take_combine_buffer(round);
    const auto rank = static_cast<std::size_t>(buffer_.rank());
    const reference::RankOutput& rows = outcome->received[rank];
    if (rows.num_rows > 0) {
      memory_.upload(rows_of(operation.y(round), 0, rows.num_rows), outcome->y[rank].data());
    }
    operation.combine(round);
    suffer();
    operation.combine_hook()();
    operation.settle();
    Present combined_by = present(received.handle);
    for (std::size_t i = 0; i < combined_by.size(); ++i) {
      combined_by[i] = combined_by[i] && received_by[i];
    }
    const std::string wrong = judge_.combined(one, *outcome, operation.out(), combined_by);
    if (!wrong.empty()) return fail("combine: " + wrong);
    before_ = received.handle.active();

    ledger_.operations += 2;
    for (const std::int32_t count : rows.counts) ledger_.rows += count;
    ledger_.rows += one.inputs.problem.ranks[rank].num_tokens;
  }

  const SessionPlan& plan_;
  Ledger& ledger_;
  Ledger::Rank& self_;
  const ReportFunction& report_;
  Memory memory_;
  Buffer& buffer_;
  Judge judge_;
  Present before_;  // who took part in the pair before
  std::int64_t pairs_ = 0;
  bool failed_ = false;
};

}  // namespace

void run_session(const SessionPlan& plan, Ledger& ledger, Buffer& buffer, std::int64_t first,
                 const ReportFunction& report) {
  Session(plan, ledger, buffer, report).run(first);
}

}  // namespace tandem::tools
