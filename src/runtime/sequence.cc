#include "runtime/sequence.h"

#include <string>

#include "tandem/error.h"

namespace tandem::runtime {

void Sequence::require_room(bool has_hook) const {
  if (held_.size() >= layout::kNumHalves) {
    throw Error(ErrorCode::kOrder,
                "the hooks of two operations have not run; a third would wait for itself: run the "
                "oldest hook first");
  }
  if (!has_hook && !held_.empty()) {
    throw Error(
        ErrorCode::kOrder,
        "the hook of an earlier operation has not run, and this one, called without a hook, "
        "would be received before it: run that hook first");
  }
}

bool Sequence::is_held(int half) const {
  for (const Held& held : held_) {
    if (held.half == half) return true;
  }
  return false;
}

int Sequence::choose_half(bool has_hook) const {
  require_room(has_hook);
  const int preferred = last_combined_ ? last_half_ : last_half_ ^ 1;
  for (const int half : {preferred, preferred ^ 1}) {
    if (!is_reserved(half) && !is_held(half)) return half;
  }
  throw Error(ErrorCode::kOrder,
              "both halves of the buffer are taken: reserved by next_combine_buffer for a combine "
              "that has not been called, or by an operation whose hook has not run");
}

std::uint64_t Sequence::record(int half, bool has_hook) {
  const std::uint64_t operation = ++num_operations_;
  if (has_hook) held_.push_back({operation, half});
  return operation;
}

std::uint64_t Sequence::record_dispatch(int half, bool has_hook) {
  owner_[half] = next_id_++;
  last_half_ = half;
  last_combined_ = false;
  return record(half, has_hook);
}

void Sequence::require_received(DispatchId dispatch) const {
  if (dispatch.id == 0 || owner_[dispatch.half] != dispatch.id) {
    throw Error(ErrorCode::kStaleHandle,
                "the handle is of dispatch number " + std::to_string(dispatch.id) +
                    " on this buffer, and number " + std::to_string(owner_[dispatch.half]) +
                    " has taken its half since; a handle lives until the next operation but one");
  }
  if (is_held(dispatch.half)) {
    throw Error(
        ErrorCode::kOrder,
        "the last operation on this handle's half has a hook that has not run: run it first");
  }
}

void Sequence::require_combine(DispatchId dispatch, bool has_hook) const {
  require_received(dispatch);
  require_room(has_hook);
}

std::uint64_t Sequence::record_combine(int half, bool has_hook) {
  reserved_[half].reset();
  if (half == last_half_) last_combined_ = true;
  return record(half, has_hook);
}

void Sequence::require_oldest(std::uint64_t operation) const {
  if (held_.empty() || held_.front().operation != operation) {
    throw Error(ErrorCode::kOrder,
                "hooks run in the order of their operations: the hook of an "
                "earlier operation has not run");
  }
}

void Sequence::restart() {
  owner_ = {};
  reserved_ = {};
  held_.clear();
  last_combined_ = true;
}

}  // namespace tandem::runtime
