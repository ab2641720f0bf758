#include "backend/cuda/cuda_buffer.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/error_text.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/launch.h"
#include "runtime/agreement.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kPieceAlignment = 256;
// IPC names whole allocations of the driver; one of this size is never a part of a bigger one.
constexpr std::int64_t kIpcUnit = std::int64_t{2} << 20;

cudaStream_t stream_of(void* stream) {
  // Null is the thread's own default stream: on the legacy one, which all threads share, a rank's
  // kernel would be queued behind that of a peer that waits for it.
  return stream == nullptr ? cudaStreamPerThread : static_cast<cudaStream_t>(stream);
}

bool is_multiple_of_16(const void* data, std::int64_t pitch) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && pitch % 16 == 0;
}

std::vector<const void*> all_kernels() {
  return {dispatch_kernel_for(Format::kBFloat16, DType::kBFloat16),
          dispatch_kernel_for(Format::kFp8, DType::kBFloat16),
          dispatch_kernel_for(Format::kFp8, DType::kFloat16),
          dispatch_kernel_for(Format::kFp8, DType::kFloat32),
          receive_kernel(),
          combine_kernel_for(DType::kBFloat16),
          combine_kernel_for(DType::kFloat16),
          combine_kernel_for(DType::kFloat32),
          stage_kernel(),
          acquire_kernel()};
}

int threads_of(const void* kernel) {
  return kernel == combine_kernel_for(DType::kBFloat16) ||
                 kernel == combine_kernel_for(DType::kFloat16) ||
                 kernel == combine_kernel_for(DType::kFloat32)
             ? kCombineThreads
             : kNumThreads;
}

// Takes a CombineParams.
bool is_of_combine(const void* kernel) {
  return kernel == stage_kernel() || kernel == acquire_kernel() ||
         kernel == combine_kernel_for(DType::kBFloat16) ||
         kernel == combine_kernel_for(DType::kFloat16) ||
         kernel == combine_kernel_for(DType::kFloat32);
}

}  // namespace

struct CudaBuffer::Pieces {
  std::int64_t state = 0;
  std::int64_t blocks = 0;
  std::int64_t expert_map = 0;
  std::int64_t by_rank = 0;
  std::int64_t first_of_rank = 0;
  std::int64_t trace = 0;
  std::int64_t counts[2];
  std::int64_t offsets[2];
  std::int64_t ranges[2];
  std::int64_t source_tokens[2];
  std::int64_t routes[2];
  std::int64_t size_bytes = 0;

  explicit Pieces(const runtime::BufferPlan& plan) {
    const auto reserve = [this](std::int64_t bytes) {
      const std::int64_t offset = size_bytes;
      size_bytes += layout::round_up(bytes, kPieceAlignment);
      return offset;
    };
    const layout::Capacity& capacity = plan.block.capacity();
    const std::int64_t num_local = plan.experts.num_local(plan.rank);
    state = reserve(2 * sizeof(DeviceState));  // the second is warm_up's
    blocks = reserve(plan.num_ranks * std::int64_t{sizeof(std::byte*)});
    expert_map = reserve(plan.experts.num_experts() * std::int64_t{4});
    by_rank = reserve(plan.experts.num_experts() * std::int64_t{4});
    first_of_rank = reserve((plan.num_ranks + 1) * std::int64_t{4});
    trace = reserve(std::int64_t{kMaxBlocks} * kTracePhases * 8);
    for (int half = 0; half < 2; ++half) {
      counts[half] = reserve(num_local * 4);
      offsets[half] = reserve((num_local + 1) * 8);
      ranges[half] = reserve(num_local * plan.num_ranks * 8);
      source_tokens[half] = reserve(capacity.landing_rows > 0 ? capacity.rows * 4 : 0);
      routes[half] = reserve(std::int64_t{capacity.max_tokens} * capacity.max_topk * 8);
    }
  }
};

CudaBuffer::CudaBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap,
                       const runtime::BufferPlan& plan)
    : plan_(plan) {
  DeviceFacts own{};
  runtime::agree(*bootstrap, [&] {
    device_ = resolve_device(plan.options.device);
    if (plan.options.num_experts > kMaxExperts) {
      throw Error(ErrorCode::kUnsupported, "num_experts is " +
                                               std::to_string(plan.options.num_experts) +
                                               ", on CUDA at most " + std::to_string(kMaxExperts));
    }
    const DeviceScope scope(device_);
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    if (properties.major < 8) {
      throw Error(ErrorCode::kUnsupported,
                  std::string(properties.name) + " is older than compute capability 8.0");
    }
    num_sms_ = properties.multiProcessorCount;
    std::memcpy(own.uuid, &properties.uuid, sizeof own.uuid);
    own.device = device_;
    own.num_sms = num_sms_;
    own.chosen_blocks = plan.options.num_sms;
    shared_bytes_ =
        std::max({dispatch_shared_bytes(plan.num_ranks, plan.options.num_experts),
                  receive_shared_bytes(plan.num_ranks, plan.options.num_experts),
                  combine_shared_bytes(plan.num_ranks), stage_shared_bytes(), kLeastSharedBytes});
    if (shared_bytes_ > static_cast<std::int64_t>(properties.sharedMemPerBlockOptin)) {
      throw Error(ErrorCode::kUnsupported, std::to_string(plan.options.num_experts) +
                                               " experts and " + std::to_string(plan.num_ranks) +
                                               " ranks need " + std::to_string(shared_bytes_) +
                                               " bytes of shared memory, " + properties.name +
                                               " has " +
                                               std::to_string(properties.sharedMemPerBlockOptin));
    }
    for (const void* kernel : all_kernels()) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes_)),
                 "cudaFuncSetAttribute");
    }
    allocate();
    return 0;
  });
  std::vector<std::byte> message(sizeof own);
  std::memcpy(message.data(), &own, sizeof own);
  std::vector<DeviceFacts> facts;
  for (const auto& bytes : bootstrap->all_gather(message)) {
    std::memcpy(&facts.emplace_back(), bytes.data(), sizeof own);
  }
  for (const DeviceFacts& peer : facts) {
    if (std::memcmp(peer.uuid, own.uuid, sizeof own.uuid) != 0) view_.across_devices = 1;
  }
  runtime::agree(*bootstrap, [&] {
    choose_blocks(facts);
    return 0;
  });
  peers_ = std::make_unique<PeerMemory>(bootstrap, block_, device_, facts);
  runtime::agree(*bootstrap, [&] {
    fill_tables();
    warm_up();
    return 0;
  });
}

CudaBuffer::~CudaBuffer() {
  if (view_.trace != nullptr) print_trace();
  if (peers_ != nullptr && record_ != nullptr &&
      std::atomic_ref(record_->written).load(std::memory_order_acquire) != 0) {
    peers_->abandon();
  }
  // Nothing of this rank may still run when its memory goes. Bounded by the timeout of its waits.
  if (has_last_stream_) warn_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  peers_.reset();
  for (cudaEvent_t event : {eager_event_, captured_event_}) {
    if (event != nullptr) warn_cuda(cudaEventDestroy(event), "cudaEventDestroy");
  }
  if (reset_stream_ != nullptr) warn_cuda(cudaStreamDestroy(reset_stream_), "cudaStreamDestroy");
}

void CudaBuffer::allocate() {
  const Pieces pieces(plan_);
  block_ = allocate_device(
      device_, layout::round_up(plan_.block.size_bytes(), plan_.num_ranks > 1 ? kIpcUnit : 1));
  own_memory_ = allocate_device(device_, pieces.size_bytes);
  record_memory_ = allocate_mapped_host(device_, sizeof(ErrorRecord));
  record_ = new (record_memory_.get()) ErrorRecord();
  prepare_host_copies(device_);
  for (cudaEvent_t* event : {&eager_event_, &captured_event_}) {
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  check_cuda(cudaStreamCreateWithFlags(&reset_stream_, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");

  std::byte* const base = own_memory_.get();
  view_.block = plan_.block;
  view_.blocks = reinterpret_cast<std::byte* const*>(base + pieces.blocks);
  view_.expert_map = reinterpret_cast<const std::uint32_t*>(base + pieces.expert_map);
  view_.by_rank = reinterpret_cast<const std::int32_t*>(base + pieces.by_rank);
  view_.first_of_rank = reinterpret_cast<const std::int32_t*>(base + pieces.first_of_rank);
  view_.state = reinterpret_cast<DeviceState*>(base + pieces.state);
  void* record_on_device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&record_on_device, record_, 0), "cudaHostGetDevicePointer");
  view_.record = static_cast<ErrorRecord*>(record_on_device);
  const auto timeout = plan_.options.timeout;
  view_.timeout_ns = timeout == BufferOptions::kForever
                         ? ~std::uint64_t{0}
                         : static_cast<std::uint64_t>(timeout.count());
  view_.rank = plan_.rank;
  view_.num_ranks = plan_.num_ranks;
  view_.num_experts = plan_.options.num_experts;
  if (std::getenv("TANDEM_CUDA_TRACE") != nullptr) {
    view_.trace = reinterpret_cast<std::uint64_t*>(base + pieces.trace);
    check_cuda(cudaMemset(view_.trace, 0, std::size_t{kMaxBlocks} * kTracePhases * 8),
               "cudaMemset");
  }
  for (int half = 0; half < 2; ++half) {
    view_.arrays[half] = {
        .counts = reinterpret_cast<std::int32_t*>(base + pieces.counts[half]),
        .offsets = reinterpret_cast<std::int64_t*>(base + pieces.offsets[half]),
        .ranges = reinterpret_cast<std::int64_t*>(base + pieces.ranges[half]),
        .source_tokens = reinterpret_cast<std::int32_t*>(base + pieces.source_tokens[half]),
        .routes = reinterpret_cast<Route*>(base + pieces.routes[half]),
    };
  }

  // Control words of before the first epoch, so that none is taken for a fresh one.
  const layout::Epoch first = plan_.options.first_epoch;
  std::vector<layout::Word> control(
      static_cast<std::size_t>(plan_.block.control_bytes()) / sizeof(layout::Word),
      layout::make_word(first - 3, 0));
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    control[static_cast<std::size_t>(plan_.block.completed(rank)) / sizeof(layout::Word)] =
        layout::make_word(first - 1, 0);
  }
  check_cuda(cudaMemcpy(block_.get(), control.data(), control.size() * sizeof(layout::Word),
                        cudaMemcpyHostToDevice),
             "cudaMemcpy");
}

void CudaBuffer::fill_tables() {
  const DeviceScope scope(device_);
  const Pieces pieces(plan_);
  std::vector<std::byte> image(static_cast<std::size_t>(pieces.trace));
  DeviceState states[2];
  const layout::Epoch first = plan_.options.first_epoch;
  states[0].send = layout::make_word(first, 0);
  states[0].receive = layout::make_word(first, 0);
  for (HalfState& half : states[0].half) half.combine_epoch = first - 1;
  states[1].failed = 1;  // kernels that warm up end at once
  std::memcpy(image.data() + pieces.state, states, sizeof states);
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    std::byte* const block = peers_->block(rank);
    std::memcpy(image.data() + pieces.blocks + rank * sizeof block, &block, sizeof block);
  }
  const core::ExpertMap& experts = plan_.experts;
  for (int expert = 0; expert < experts.num_experts(); ++expert) {
    const std::uint32_t mapped = (static_cast<std::uint32_t>(experts.owner(expert)) << 16) |
                                 static_cast<std::uint32_t>(experts.local_index(expert));
    std::memcpy(image.data() + pieces.expert_map + expert * sizeof mapped, &mapped, sizeof mapped);
  }
  std::memcpy(image.data() + pieces.by_rank, experts.by_rank().data(),
              experts.by_rank().size_bytes());
  std::memcpy(image.data() + pieces.first_of_rank, experts.first().data(),
              experts.first().size_bytes());
  check_cuda(cudaMemcpy(own_memory_.get(), image.data(), image.size(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
}

// The kernels of ranks that share a GPU wait for each other, so they must fit side by side, one
// block to a multiprocessor. The default is a rank's share, rounded down to a multiple of 8.
void CudaBuffer::choose_blocks(const std::vector<DeviceFacts>& facts) {
  int sharers = 0;
  const DeviceFacts& own = facts[plan_.rank];
  for (const DeviceFacts& peer : facts) {
    if (std::memcmp(peer.uuid, own.uuid, sizeof own.uuid) == 0) ++sharers;
  }
  if (sharers > num_sms_) {
    throw Error(ErrorCode::kInvalidArgument, std::to_string(sharers) + " ranks share CUDA device " +
                                                 std::to_string(device_) + ", which has " +
                                                 std::to_string(num_sms_) +
                                                 " multiprocessors; every rank needs one at least");
  }
  most_blocks_ = std::min(kMaxBlocks, num_sms_ / sharers);
  default_blocks_ = most_blocks_ >= 16 ? most_blocks_ / 8 * 8 : most_blocks_;
}

void CudaBuffer::warm_up() {
  const DeviceScope scope(device_);
  DispatchParams dispatch;
  dispatch.buffer = view_;
  dispatch.buffer.state = view_.state + 1;
  dispatch.topk = 1;
  CombineParams combine;
  combine.buffer = dispatch.buffer;
  for (const void* kernel : all_kernels()) {
    const bool combines = is_of_combine(kernel);
    const void* params =
        combines ? static_cast<const void*>(&combine) : static_cast<const void*>(&dispatch);
    launch(kernel, params, 1, nullptr);
  }
  check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
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
  CombineParams params;
  params.buffer = view_;
  params.half = half;
  launch(acquire_kernel(), &params, 1, last_stream_);
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
  params.chunks_per_row =
      static_cast<std::uint32_t>((row_bytes + params.chunk_bytes - 1) / params.chunk_bytes);
  // At most 2^24 tokens of 128 chunks.
  const auto units = static_cast<std::uint32_t>(call.num_tokens) * params.chunks_per_row;
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
  if (call.placement == Placement::kSlotted) {
    params.recv_x = call.recv_x.as<std::byte>();
    params.recv_scales = call.recv_scales.as<std::byte>();
    params.recv_aligned = is_multiple_of_16(params.recv_x, call.row.value_bytes()) ? 1 : 0;
  }
  return params;
}

void CudaBuffer::dispatch(const runtime::DispatchCall& call, runtime::Stage stage) {
  check();
  cudaStream_t const stream = stream_of(call.stream);
  follow(stream);
  const int num_blocks = blocks_for(call.num_sms);
  const DispatchParams params = dispatch_params(call, num_blocks);
  const bool slotted = call.placement == Placement::kSlotted;
  combined_[call.half] = false;
  if (runtime::sends(stage)) {
    launch(dispatch_kernel_for(call.row.format, call.x.dtype), &params, num_blocks, call.stream);
  }
  if (slotted && runtime::receives(stage)) {
    launch(receive_kernel(), &params, num_blocks, call.stream);
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
  check();
  cudaStream_t const stream = stream_of(call.stream);
  follow(stream);
  const int num_blocks = blocks_for(call.num_sms);
  CombineParams params = combine_params(call, num_blocks);
  combined_[params.half] = true;
  if (runtime::sends(stage) && !call.zero_copy) {
    launch(stage_kernel(), &params, num_blocks, call.stream);
  }
  params.sends = runtime::sends(stage) && call.zero_copy ? 1 : 0;
  params.receives = runtime::receives(stage) ? 1 : 0;
  if (params.sends != 0 || params.receives != 0) {
    launch(combine_kernel_for(call.dtype), &params, params.receives != 0 ? num_blocks : 1,
           call.stream);
  }
  leave(stream);
}

void CudaBuffer::launch(const void* kernel, const void* params, int num_blocks, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads_of(kernel)));
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
  if (has_last_stream_ && stream != last_stream_) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    if (last_was_captured_) {
      // Joins the capture of the last call, if that is still going on; if it is not, its graph's
      // place in the sequence is the caller's.
      if (cudaStreamWaitEvent(stream, captured_event_, 0) != cudaSuccess) (void)cudaGetLastError();
    } else if (status == cudaStreamCaptureStatusNone) {
      check_cuda(cudaStreamWaitEvent(stream, eager_event_, 0), "cudaStreamWaitEvent");
    }
  }
  last_stream_ = stream;
  has_last_stream_ = true;
}

// Records the end of a call for the next one. Not left to the next one: the caller may destroy the
// stream before.
void CudaBuffer::leave(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  last_was_captured_ = status == cudaStreamCaptureStatusActive;
  check_cuda(cudaEventRecord(last_was_captured_ ? captured_event_ : eager_event_, stream),
             "cudaEventRecord");
}

void CudaBuffer::check() {
  std::atomic_ref written(record_->written);
  if (written.load(std::memory_order_acquire) == 0) return;
  const ErrorRecord record = *record_;
  if (!is_fatal(record)) {
    // The buffer stays usable: the next error may be recorded.
    written.store(0, std::memory_order_release);
    check_cuda(cudaMemsetAsync(&view_.state->record_taken, 0, sizeof(std::uint32_t), reset_stream_),
               "cudaMemsetAsync");
  }
  throw_error(record, plan_);
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
