#include "backend/cuda/error_text.h"

#include <string>

#include "core/milliseconds.h"
#include "core/validation.h"
#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

std::string describe(const layout::ShapeArgument& shape, bool is_dispatch) {
  return "hidden size " + std::to_string(shape.hidden) + ", top-k " + std::to_string(shape.topk) +
         (is_dispatch ? ", format " + std::string(name(static_cast<Format>(shape.element)))
                      : ", dtype " + std::string(name(static_cast<DType>(shape.element)))) +
         ", placement " + std::string(name(shape.placement)) + ", layout " +
         std::string(name(shape.layout));
}

std::string mismatch_text(const ErrorRecord& record, int self) {
  const bool is_dispatch = record.operation == Operation::kDispatch;
  const std::string other = rank_text(record.peer);
  if (record.detail < 0) {
    return other + " calls " + std::string(name(static_cast<Operation>(record.seen))) + " where " +
           rank_text(self) + " calls " + std::string(name(record.operation));
  }
  if (record.detail == kImpossibleCount) {
    return other + " published an impossible count of rows or blocks";
  }
  std::string what = "other arguments";
  std::string theirs = std::to_string(record.seen);
  std::string ours = std::to_string(record.expected);
  switch (static_cast<layout::Argument>(record.detail)) {
    case layout::Argument::kMaxTokens:
      what = is_dispatch ? "max_tokens" : "a handle of the dispatch of epoch";
      break;
    case layout::Argument::kShape:
      what = "";
      theirs = describe(layout::decode_shape(static_cast<std::uint32_t>(record.seen)), is_dispatch);
      ours =
          describe(layout::decode_shape(static_cast<std::uint32_t>(record.expected)), is_dispatch);
      break;
    case layout::Argument::kAlignment:
      what = "row_alignment";
      break;
    default:
      return other + " has other arguments than " + rank_text(self);
  }
  return other + " has " + what + (what.empty() ? "" : " ") + theirs + " where " + rank_text(self) +
         " has " + ours;
}

std::string timeout_text(const ErrorRecord& record, int self) {
  return rank_text(self) + " waited for " + rank_text(record.peer) + ' ' +
         std::string(runtime::awaited(record.phase)) + "; " + rank_text(record.peer) +
         ": it has come to operation " + std::to_string(record.detail);
}

}  // namespace

bool is_fatal(const ErrorRecord& record) {
  const auto code = static_cast<ErrorCode>(record.code);
  return code == ErrorCode::kTimeout || code == ErrorCode::kMismatch ||
         code == ErrorCode::kPeerLost || code == ErrorCode::kMasked;
}

void throw_error(const ErrorRecord& record, const runtime::BufferPlan& plan,
                 const std::string& why_lost) {
  const auto code = static_cast<ErrorCode>(record.code);
  ErrorInfo info{.code = code,
                 .operation = record.operation,
                 .epoch = record.epoch,
                 .phase = record.phase,
                 .peer = record.peer,
                 .expected = record.expected,
                 .seen = record.seen,
                 .waited = std::chrono::nanoseconds(record.waited_ns),
                 .limit = std::chrono::nanoseconds{0}};
  switch (code) {
    case ErrorCode::kTimeout:
      info.limit = plan.options.timeout;
      throw Error(info, timeout_text(record, plan.rank));
    case ErrorCode::kPeerLost:
      throw Error(info, rank_text(record.peer) + ' ' + why_lost);
    case ErrorCode::kMismatch:
      throw Error(info, mismatch_text(record, plan.rank));
    case ErrorCode::kCapacity: {
      core::Excess excess{.rank = record.peer, .rows = record.seen, .limit = record.expected};
      const auto id = static_cast<int>(record.detail & 0xffffffff);
      if (record.detail >> 32 == kExcessOfExpert) excess.expert = id;
      if (record.detail >> 32 == kExcessOfSource) excess.source = id;
      core::refuse_capacity(excess, record.epoch);
    }
    case ErrorCode::kInvalidArgument:
      throw Error(info, "topk_idx[" + std::to_string(record.detail >> 32) + ", " +
                            std::to_string(record.detail & 0xffffffff) + "] is " +
                            std::to_string(record.seen) + ", must be below num_experts = " +
                            std::to_string(record.expected) + "; it was taken as none");
    case ErrorCode::kStaleHandle:
      throw Error(info, "the handle's half of the buffer belongs to a later dispatch (number " +
                            std::to_string(record.seen) + ", the handle's is " +
                            std::to_string(record.expected) + ")");
    default:
      throw Error(info, "the GPU left an unknown error record");
  }
}

}  // namespace tandem::cuda
