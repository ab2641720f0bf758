#include "backend/cuda/cuda_buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/launch.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

cudaStream_t stream_of(void* stream) {
  // Null is the thread's own default stream: on the legacy one, which all threads share, a rank's
  // kernel would be queued behind that of a peer that waits for it.
  return stream == nullptr ? cudaStreamPerThread : static_cast<cudaStream_t>(stream);
}

bool is_multiple_of_16(const void* data, std::int64_t pitch) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && pitch % 16 == 0;
}

// A warp for each piece of a block's share, as far as a block has warps.
int threads_for(const CombineParams& params) {
  const auto warps = params.pieces_per_block + (params.blocks_with_one_more > 0 ? 1 : 0);
  return static_cast<int>(std::clamp<std::uint32_t>(warps, kLeastThreads / 32, kNumWarps)) * 32;
}

}  // namespace

CudaBuffer::~CudaBuffer() {
  if (view_.trace != nullptr) print_trace();
  // Nothing of this rank may still run when its memory goes. Bounded by the timeout of its waits.
  int device_before = device_;
  warn_cuda(cudaGetDevice(&device_before), "cudaGetDevice");
  warn_cuda(cudaSetDevice(device_), "cudaSetDevice");
  if (last_event_ != nullptr && !last_was_captured_) {
    warn_cuda(cudaEventSynchronize(last_event_), "cudaEventSynchronize");
  }
  if (watcher_.joinable()) {
    try {
      const std::lock_guard lock(mutex_);
      static_cast<void>(come_to_rest());  // if not, the others wait in vain for it, and say so
    } catch (const Error& error) {
      std::fprintf(stderr, "tandem: %s\n", error.what());
    }
    watcher_.request_stop();
    watcher_.join();
  }
  // Says that this rank has left. Before waiting for the device, where kernels of ranks that are
  // threads of this process may be waiting for this one.
  if (relay_) relay_->set_newest_view(nullptr);
  roster_.reset();
  if (last_stream_ != nullptr) warn_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  relay_.reset();
  peers_.reset();
  for (cudaEvent_t event : events_) {
    if (event != nullptr) warn_cuda(cudaEventDestroy(event), "cudaEventDestroy");
  }
  if (side_stream_ != nullptr) warn_cuda(cudaStreamDestroy(side_stream_), "cudaStreamDestroy");
  warn_cuda(cudaSetDevice(device_before), "cudaSetDevice");
}

runtime::HandleArrays CudaBuffer::handle_arrays(int half) {
  const BufferView::Arrays& arrays = view_.arrays[half];
  return {.counts = arrays.counts,
          .offsets = arrays.offsets,
          .ranges = arrays.ranges,
          .source_tokens = arrays.source_tokens};
}

// The receive phase of a dispatch waits for rule 2 of its half before it ends, so there is nothing
// to do unless a combine has used the half since.
void CudaBuffer::acquire_combine_half(int half) {
  check();
  if (!combined_[half]) return;
  const DeviceScope scope(device_);
  CombineParams params;
  params.buffer = view_;
  params.half = half;
  void* const stream = dispatch_streams_[half];
  follow(stream_of(stream));
  launch(acquire_kernel(), &params, 1, stream);
  leave(stream_of(stream));
}

int CudaBuffer::blocks_for(int asked) const {
  if (asked == 0) asked = plan_.options.num_sms;
  return asked == 0 ? default_blocks_ : std::min(asked, most_blocks_);
}

DispatchParams CudaBuffer::dispatch_params(const runtime::DispatchCall& call,
                                           int num_blocks) const {
  DispatchParams params;
  params.buffer = view_;
  params.x = call.x.as<std::byte>();
  params.x_element_bytes = size_of(call.x.dtype);
  params.x_pitch = call.x.strides[0] * params.x_element_bytes;
  params.topk_idx = call.topk_idx.data;
  params.wide_indices = call.topk_idx.dtype == DType::kInt64 ? 1 : 0;
  params.num_tokens = call.num_tokens;
  params.topk = call.topk;
  params.max_tokens = call.max_tokens;
  params.row = call.row;
  const std::int64_t row_bytes = std::int64_t{call.row.hidden} * params.x_element_bytes;
  params.x_aligned = is_multiple_of_16(params.x, params.x_pitch) && row_bytes % 16 == 0 ? 1 : 0;
  // Few tokens: smaller chunks, so that every block gets some.
  const std::int64_t wanted = 2 * std::int64_t{num_blocks};
  std::int64_t chunks = (row_bytes + kChunkBytes - 1) / kChunkBytes;
  if (chunks * call.num_tokens < wanted && call.num_tokens > 0) {
    const std::int64_t most = std::max<std::int64_t>(chunks, row_bytes / 512);
    chunks = std::min(most, (wanted + call.num_tokens - 1) / call.num_tokens);
  }
  // A chunk of fp8 is whole words of UE8M0 scales: four groups of 128 channels.
  const std::int64_t unit =
      is_fp8(call.row.format) ? 4 * kFp8GroupSize * params.x_element_bytes : 16;
  params.chunk_bytes = static_cast<std::int32_t>(std::min<std::int64_t>(
      kChunkBytes, layout::round_up((row_bytes + chunks - 1) / chunks, unit)));
  const auto chunks_per_row =
      static_cast<std::uint32_t>((row_bytes + params.chunk_bytes - 1) / params.chunk_bytes);
  // Fewer tokens still: several warps share the destinations of a chunk.
  const auto num_tokens = static_cast<std::uint32_t>(call.num_tokens);
  while ((2 << params.log_parts) <= call.topk &&
         (chunks_per_row << (params.log_parts + 1)) * num_tokens <=
             static_cast<std::uint32_t>(num_blocks) * kNumWarps) {
    ++params.log_parts;
  }
  params.units_per_row = chunks_per_row << params.log_parts;
  const std::uint32_t units = num_tokens * params.units_per_row;  // 2^24 tokens of 128 chunks fit
  params.units_per_block = units / static_cast<std::uint32_t>(num_blocks);
  params.blocks_with_one_more = units % static_cast<std::uint32_t>(num_blocks);
  params.slotted = call.placement == Placement::kSlotted ? 1 : 0;
  params.padded = call.layout == Layout::kPadded ? 1 : 0;
  params.row_alignment = call.row_alignment;
  params.half = call.half;
  params.id = call.id;
  params.arguments[static_cast<int>(layout::Argument::kMaxTokens)] =
      static_cast<std::uint32_t>(call.max_tokens);
  params.arguments[static_cast<int>(layout::Argument::kShape)] =
      layout::encode(layout::ShapeArgument{.hidden = call.row.hidden,
                                           .topk = call.topk,
                                           .element = static_cast<std::uint32_t>(call.row.format),
                                           .placement = call.placement,
                                           .layout = call.layout});
  params.arguments[static_cast<int>(layout::Argument::kAlignment)] =
      static_cast<std::uint32_t>(call.row_alignment);
  params.arguments_hash = layout::hash_arguments(params.arguments);
  params.pitch = static_cast<std::int32_t>(call.row.pitch());
  params.exceeds_cache =
      std::int64_t{call.num_tokens} * call.topk * params.pitch > cache_share_ ? 1 : 0;
  // Exact for i below 1024 = kTileEntries: it is too large by less than 1 / 1024.
  static_assert(kTileEntries <= 1024);
  const auto topk = static_cast<std::uint32_t>(call.topk);
  params.topk_reciprocal = ((1U << 20) + topk - 1) / topk;
  if (call.placement == Placement::kSlotted) {
    params.recv_x = call.recv_x.as<std::byte>();
    params.recv_scales = call.recv_scales.as<std::byte>();
    params.recv_aligned = is_multiple_of_16(params.recv_x, call.row.value_bytes()) ? 1 : 0;
  }
  return params;
}

void CudaBuffer::dispatch(const runtime::DispatchCall& call, runtime::Stage stage) {
  check(stage);
  const DeviceScope scope(device_);
  cudaStream_t const stream = stream_of(call.stream);
  follow(stream);
  const int num_blocks = blocks_for(call.num_sms);
  const DispatchParams params = dispatch_params(call, num_blocks);
  const bool slotted = call.placement == Placement::kSlotted;
  combined_[call.half] = false;
  dispatch_streams_[call.half] = call.stream;
  if (runtime::sends(stage)) {
    launch(dispatch_kernel_for(call.row.format, call.x.dtype, variant_), &params, num_blocks,
           call.stream);
  }
  if (slotted && runtime::receives(stage)) {
    launch(receive_kernel(variant_), &params, num_blocks, call.stream);
  }
  leave(stream);
}

CombineParams CudaBuffer::combine_params(const runtime::CombineCall& call, int num_blocks) const {
  CombineParams params;
  params.buffer = view_;
  params.weights = call.weights.as<float>();
  params.out = call.out.as<std::byte>();
  params.element_bytes = size_of(call.dtype);
  params.out_pitch = call.out.strides[0] * params.element_bytes;
  params.out_aligned = is_multiple_of_16(params.out, params.out_pitch) ? 1 : 0;
  params.num_tokens = call.dispatch.num_tokens;
  params.topk = call.dispatch.topk;
  params.hidden = call.hidden;
  params.half = call.dispatch.half;
  params.dispatch_id = call.dispatch.id;
  params.shape_argument =
      layout::encode(layout::ShapeArgument{.hidden = call.hidden,
                                           .topk = call.dispatch.topk,
                                           .element = static_cast<std::uint32_t>(call.dtype),
                                           .placement = call.dispatch.placement,
                                           .layout = call.dispatch.layout});
  params.alignment_argument = static_cast<std::uint32_t>(call.dispatch.row_alignment);
  params.y = call.y.as<std::byte>();
  params.y_pitch = call.y.strides[call.y.num_dims - 2] * params.element_bytes;
  const std::int64_t row_bytes = std::int64_t{call.hidden} * params.element_bytes;
  params.pieces_per_row = static_cast<std::uint32_t>((row_bytes + 511) / 512);
  const std::uint32_t pieces =
      params.pieces_per_row * static_cast<std::uint32_t>(params.num_tokens);
  params.pieces_per_block = pieces / static_cast<std::uint32_t>(num_blocks);
  params.blocks_with_one_more = pieces % static_cast<std::uint32_t>(num_blocks);
  params.y_aligned = is_multiple_of_16(params.y, params.y_pitch) && row_bytes % 16 == 0 ? 1 : 0;
  return params;
}

void CudaBuffer::combine(const runtime::CombineCall& call, runtime::Stage stage) {
  check(stage);
  const DeviceScope scope(device_);
  cudaStream_t const stream = stream_of(call.stream);
  follow(stream);
  const int num_blocks = blocks_for(call.num_sms);
  CombineParams params = combine_params(call, num_blocks);
  combined_[params.half] = true;
  if (runtime::sends(stage) && !call.zero_copy) {
    launch(stage_kernel(variant_), &params, num_blocks, call.stream);
  }
  params.sends = runtime::sends(stage) && call.zero_copy ? 1 : 0;
  params.receives = runtime::receives(stage) ? 1 : 0;
  if (params.sends != 0 || params.receives != 0) {
    launch(combine_kernel_for(call.dtype, variant_), &params, params.receives != 0 ? num_blocks : 1,
           call.stream, threads_for(params));
  }
  leave(stream);
}

void CudaBuffer::launch(const void* kernel, const void* params, int num_blocks, void* stream,
                        int num_threads) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes_);
  config.stream = stream_of(stream);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelExC");
}

// Makes `stream` wait for the last call, if that was on another one.
void CudaBuffer::follow(cudaStream_t stream) {
  if (last_event_ != nullptr && stream != last_stream_) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    if (last_was_captured_) {
      // Joins the capture of the last call, if that is still going on; if it is not, its graph's
      // place in the sequence is the caller's.
      if (cudaStreamWaitEvent(stream, last_event_, 0) != cudaSuccess) (void)cudaGetLastError();
    } else if (status == cudaStreamCaptureStatusNone) {
      check_cuda(cudaStreamWaitEvent(stream, last_event_, 0), "cudaStreamWaitEvent");
    }
  }
  last_stream_ = stream;
}

// Records the end of a call for the next one. Not left to the next one: the caller may destroy the
// stream before.
void CudaBuffer::leave(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  last_was_captured_ = status == cudaStreamCaptureStatusActive;
  last_event_ = events_[next_event_];
  next_event_ = (next_event_ + 1) % events_.size();
  check_cuda(cudaEventRecord(last_event_, stream), "cudaEventRecord");
}

void CudaBuffer::print_trace() const {
  std::vector<std::uint64_t> stamps(std::size_t{kMaxBlocks} * kTracePhases);
  if (cudaMemcpy(stamps.data(), view_.trace, stamps.size() * 8, cudaMemcpyDeviceToHost) !=
      cudaSuccess) {
    return;
  }
  for (const int base : {0, 16}) {
    std::uint64_t start = ~std::uint64_t{0};
    for (int block = 0; block < kMaxBlocks; ++block) {
      const std::uint64_t stamp = stamps[block * kTracePhases + base];
      if (stamp != 0) start = std::min(start, stamp);
    }
    std::string line = "trace rank " + std::to_string(plan_.rank) + ":";
    for (int phase = base; phase < base + 16; ++phase) {
      std::uint64_t low = ~std::uint64_t{0};
      std::uint64_t high = 0;
      for (int block = 0; block < kMaxBlocks; ++block) {
        const std::uint64_t stamp = stamps[block * kTracePhases + phase];
        if (stamp == 0) continue;
        low = std::min(low, stamp);
        high = std::max(high, stamp);
      }
      if (high == 0) continue;
      line += " " + std::to_string(phase) + "=" +
              std::to_string(static_cast<std::int64_t>(low - start)) + ".." +
              std::to_string(static_cast<std::int64_t>(high - start));
    }
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

}  // namespace tandem::cuda
