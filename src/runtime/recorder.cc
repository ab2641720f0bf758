#include "runtime/recorder.h"

#include "runtime/backend.h"
#include "runtime/buffer_state.h"
#include "tandem/error.h"

namespace tandem::runtime {

std::unique_ptr<Recorder> make_recorder(Backend which, int device) {
  return backend(which).make_recorder(device);
}

void use_device(Backend which, int number) { backend(which).use_device(number); }

void reserve_unwritten(const DispatchHandle& handle) {
  const std::shared_ptr<BufferState> buffer = handle ? handle.state()->buffer.lock() : nullptr;
  if (buffer == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "handle is empty, or its buffer is gone");
  }
  buffer->reserve_unwritten(handle);
}

}  // namespace tandem::runtime
