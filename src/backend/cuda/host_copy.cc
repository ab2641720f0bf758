#include "backend/cuda/host_copy.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kPinnedBytes = std::int64_t{8} << 20;  // some rows of the widest kind

thread_local std::shared_ptr<std::byte> pinned;

bool is_pageable(const void* pointer) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeUnregistered;
}

void copy_2d_and_wait(void* destination, std::int64_t destination_pitch, const void* source,
                      std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
                      cudaStream_t stream) {
  // The stream first: a copy engine that is to copy behind an operation would keep copies of other
  // ranks waiting, which that operation may wait for.
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (num_rows == 1 || (destination_pitch == row_bytes && source_pitch == row_bytes)) {
    check_cuda(cudaMemcpyAsync(destination, source, static_cast<std::size_t>(row_bytes * num_rows),
                               cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  } else {
    check_cuda(cudaMemcpy2DAsync(destination, static_cast<std::size_t>(destination_pitch), source,
                                 static_cast<std::size_t>(source_pitch),
                                 static_cast<std::size_t>(row_bytes),
                                 static_cast<std::size_t>(num_rows), cudaMemcpyDefault, stream),
               "cudaMemcpy2DAsync");
  }
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void copy_on_host(std::byte* destination, std::int64_t destination_pitch, const std::byte* source,
                  std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(destination + row * destination_pitch, source + row * source_pitch,
                static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace

void prepare_host_copies(int device) {
  if (pinned == nullptr) pinned = allocate_mapped_host(device, kPinnedBytes);
}

void copy_rows(void* destination, std::int64_t destination_pitch, const void* source,
               std::int64_t source_pitch, std::int64_t row_bytes, std::int64_t num_rows,
               void* stream_pointer) {
  if (row_bytes == 0 || num_rows == 0) return;
  cudaStream_t const stream =
      stream_pointer == nullptr ? cudaStreamPerThread : static_cast<cudaStream_t>(stream_pointer);
  const bool from_pageable = is_pageable(source);
  const bool to_pageable = is_pageable(destination);
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  if (from_pageable && to_pageable) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    copy_on_host(to, destination_pitch, from, source_pitch, row_bytes, num_rows);
    return;
  }
  if (!from_pageable && !to_pageable) {
    copy_2d_and_wait(to, destination_pitch, from, source_pitch, row_bytes, num_rows, stream);
    return;
  }
  prepare_host_copies(resolve_device(-1));
  // As many rows as fit; a row that does not fit, in pieces.
  const std::int64_t piece_bytes = std::min(row_bytes, kPinnedBytes);
  const std::int64_t piece_rows = std::max<std::int64_t>(1, kPinnedBytes / row_bytes);
  for (std::int64_t row = 0; row < num_rows; row += piece_rows) {
    const std::int64_t rows = std::min(piece_rows, num_rows - row);
    for (std::int64_t at = 0; at < row_bytes; at += piece_bytes) {
      const std::int64_t bytes = std::min(piece_bytes, row_bytes - at);
      std::byte* const to_piece = to + row * destination_pitch + at;
      const std::byte* const from_piece = from + row * source_pitch + at;
      if (from_pageable) {
        copy_on_host(pinned.get(), bytes, from_piece, source_pitch, bytes, rows);
        copy_2d_and_wait(to_piece, destination_pitch, pinned.get(), bytes, bytes, rows, stream);
      } else {
        copy_2d_and_wait(pinned.get(), bytes, from_piece, source_pitch, bytes, rows, stream);
        copy_on_host(to_piece, destination_pitch, pinned.get(), bytes, bytes, rows);
      }
    }
  }
}

}  // namespace tandem::cuda
