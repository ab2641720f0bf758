#include "soak/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "common/lockstep.h"
#include "runtime/recorder.h"
#include "soak/judge.h"
#include "soak/menace.h"
#include "test_low_latency/problem.h"

namespace tandem::tools {

namespace {

class Session {
 public:
  Session(const SessionPlan& plan, Ledger& ledger, Buffer& buffer, const ReportFunction& report)
      : plan_(plan),
        ledger_(ledger),
        self_(ledger.ranks[buffer.rank()]),
        report_(report),
        recorder_(runtime::make_recorder(plan.options.backend, -1)),
        memory_(plan.options.backend, recorder_->stream()),
        buffer_(buffer),
        judge_(memory_, buffer.rank()),
        before_(static_cast<std::size_t>(buffer.num_ranks()), true) {}

  // Nothing is allocated afterwards. With `all`, until all of them have come so far: on a GPU that
  // ranks share, making memory would wait for an operation that waits for this rank.
  void prepare(const Communicator* all) {
    const auto allocate = [this] {
      for (const SoakCase& one : plan_.cases) {
        tensors_.emplace_back(buffer_, memory_, one.combination, one.inputs);
      }
    };
    if (all == nullptr) return allocate();
    Lockstep lockstep(*all);
    if (lockstep.step("making tensors", allocate) &&
        lockstep.step("recording", [this] { record(); })) {
      return;
    }
    for (const std::string& error : lockstep.take_errors()) fail(error);
    failed_ = true;
  }

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
        run_pair(pair);
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
    // Counted in pairs: two operations from the next, on GPUs four.
    const std::int64_t first = pair + (plan_.options.backend == Backend::kCuda ? 2 : 1);
    if (!goes_on(first)) return;
    for (const int rank : buffer_.waiting()) {
      ledger_.ranks[rank].joins_at = first;
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

  // Who may have taken part in a pair at its beginning, though the handle does not say so any more.
  // A rank that has been let in and is lost at once may be news to this one.
  [[nodiscard]] Present possible(const Present& active, std::int64_t pair) const {
    Present possible = before_;
    for (std::size_t rank = 0; rank < possible.size(); ++rank) {
      possible[rank] = possible[rank] || active[rank] || ledger_.ranks[rank].joins_at == pair;
    }
    return possible;
  }

  // A recording is of pairs with the outputs of experts that are right if all take part.
  void record() {
    const Present everybody(before_.size(), true);
    for (std::size_t i = 0; i < plan_.cases.size(); ++i) {
      const SoakCase& one = plan_.cases[i];
      Recorded& recorded = recorded_.emplace_back();
      if (one.in_recording == 0) continue;
      recorded.outcome = &judge_.outcome(one, everybody);
      const auto rank = static_cast<std::size_t>(buffer_.rank());
      const std::int64_t num_rows = recorded.outcome->received[rank].num_rows;
      recorded.y =
          memory_.array_of(recorded.outcome->y[rank].data(), token_dtype(one.combination.format),
                           {num_rows, one.inputs.problem.hidden});
      recorded.number = recorder_->record(
          one.in_recording, [this, num_rows, &y = recorded.y, &operation = tensors_[i]] {
            operation.dispatch(0);
            operation.received(0).hook();
            operation.take_combine_buffer(0);
            if (num_rows > 0) recorder_->copy_rows(rows_of(operation.y(0), 0, num_rows), y);
            operation.combine(0);
            operation.combine_hook()();
          });
    }
  }

  void replay(std::size_t number) {
    const SoakCase& one = plan_.cases[number];
    const Recorded& recorded = recorded_[number];
    Operation& operation = tensors_[number];
    recorder_->start(recorded.number);
    recorder_->finish();
    operation.settle();
    const Present everybody(before_.size(), true);
    std::string why;
    if (judge_.received(one, operation.received(0), everybody, everybody, why) == nullptr) {
      return fail("recorded dispatch: " + why);
    }
    const std::string wrong = judge_.combined(one, *recorded.outcome, operation.out(), everybody);
    if (!wrong.empty()) return fail("recorded combine: " + wrong);
    ++ledger_.replays;
    take_note(one, *recorded.outcome, one.in_recording);
  }

  // Pairs that went well, and the rows of one of them, which were checked.
  void take_note(const SoakCase& one, const Outcome& outcome, int pairs) {
    const auto rank = static_cast<std::size_t>(buffer_.rank());
    ledger_.operations += 2 * pairs;
    for (const std::int32_t count : outcome.received[rank].counts) ledger_.rows += count;
    ledger_.rows += one.inputs.problem.ranks[rank].num_tokens;
  }

  void run_pair(std::int64_t pair) {
    suffer();
    if (plan_.replays(pair)) return replay(plan_.at(pair));
    const SoakCase& one = plan_.cases[plan_.at(pair)];
    Operation& operation = tensors_[plan_.at(pair)];
    const Present active = buffer_.active();
    const int round = static_cast<int>(pairs_++ % kNumRounds);
    operation.dispatch(round);
    suffer();
    const DispatchResult& received = operation.received(round);
    received.hook();
    operation.settle();
    const Present received_by = present(received.handle);
    std::string why;
    const Outcome* const outcome =
        judge_.received(one, received, received_by, possible(active, pair), why);
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
    // Also who was there as it began: this rank may have heard in it of a loss that others, who
    // were ahead, had in the next pair, and count in that.
    before_ = received.handle.active();
    for (std::size_t i = 0; i < before_.size(); ++i) before_[i] = before_[i] || active[i];

    take_note(one, *outcome, 1);
  }

  struct Recorded {
    int number = -1;
    const Outcome* outcome = nullptr;
    Array y;  // outputs of this rank's experts
  };

  const SessionPlan& plan_;
  Ledger& ledger_;
  Ledger::Rank& self_;
  const ReportFunction& report_;
  std::unique_ptr<runtime::Recorder> recorder_;
  Memory memory_;
  Buffer& buffer_;
  Judge judge_;
  std::deque<Operation> tensors_;  // of each case
  std::deque<Recorded> recorded_;
  Present before_;  // who was active at some time in the pair before
  std::int64_t pairs_ = 0;
  bool failed_ = false;
};

}  // namespace

void run_session(const SessionPlan& plan, Ledger& ledger, Buffer& buffer, std::int64_t first,
                 const Communicator* all, const ReportFunction& report) {
  Session session(plan, ledger, buffer, report);
  session.prepare(all);
  if (all == nullptr || plan.options.ends_ranks()) return session.run(first);
  // Whoever is done first frees no memory before the others are: on a GPU that threads share, that
  // would wait for their operations, and keep a rank from launching what they wait for.
  Lockstep lockstep(*all);
  lockstep.step("operations", [&] { session.run(first); });
  for (const std::string& error : lockstep.take_errors()) throw std::runtime_error(error);
}

}  // namespace tandem::tools
