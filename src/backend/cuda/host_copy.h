// Copies between device and host memory that never synchronise the device: pageable host memory
// goes through a pinned buffer of the thread. (A pageable copy by CUDA itself may wait for all
// kernels of the device, and so for a peer rank's, which may be waiting for this thread's next
// call.)
#pragma once

#include <cstdint>

namespace tandem::cuda {

// Allocates this thread's pinned buffer, unless it has one.
void prepare_host_copies(int device);

// Rows of bytes at the given pitches, in any memory, on `stream` (null: the thread's own default
// stream); returns when they are copied.
void copy_rows(void* destination, std::int64_t destination_pitch, const void* source,
               std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
               void* stream);

}  // namespace tandem::cuda
