// Making a CUDA buffer, together with the other ranks or as a process that joins them later:
// allocation, the tables and words that kernels start from, how many blocks may run side by side,
// and an empty launch of every kernel so that nothing is loaded later.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "backend/cuda/cuda_buffer.h"
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/launch.h"
#include "runtime/agreement.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kPieceAlignment = 256;
// Operations from a caller's next to the first for which its mask() or unmask() holds. Three would
// do for a rank that is left out (roster.cuh). One that is let in hears `completed` of the
// operation before its first, which those who end that one must know. And two pairs are four
// operations.
constexpr layout::Epoch kLead = 4;
// Timeouts that kernels wait for where hosts mask whom they miss: one until the rank is late,
// another if it waits itself, one until it is at rest, and the same again if a second rank is
// behind it.
constexpr std::uint64_t kPatience = 8;
// IPC names whole allocations of the driver; one of this size is never a part of a bigger one.
constexpr std::int64_t kIpcUnit = std::int64_t{2} << 20;

std::vector<const void*> all_kernels(Variant variant) {
  return {dispatch_kernel_for(Format::kBFloat16, DType::kBFloat16, variant),
          dispatch_kernel_for(Format::kFp8, DType::kBFloat16, variant),
          dispatch_kernel_for(Format::kFp8, DType::kFloat16, variant),
          dispatch_kernel_for(Format::kFp8, DType::kFloat32, variant),
          receive_kernel(variant),
          combine_kernel_for(DType::kBFloat16, variant),
          combine_kernel_for(DType::kFloat16, variant),
          combine_kernel_for(DType::kFloat32, variant),
          stage_kernel(variant),
          acquire_kernel()};
}

Variant variant_for(bool elsewhere, bool watched) {
  const Variant plain = elsewhere ? Variant::kElsewhere : Variant::kPlain;
  return !watched ? plain : elsewhere ? Variant::kWatchedElsewhere : Variant::kWatched;
}

// Takes a CombineParams.
bool is_of_combine(const void* kernel) {
  for (const Variant variant : kVariants) {
    if (kernel == stage_kernel(variant)) return true;
  }
  return kernel == acquire_kernel() || is_combine_kernel(kernel);
}

}  // namespace

struct CudaBuffer::Pieces {
  std::int64_t state = 0;
  std::int64_t blocks = 0;
  std::int64_t expert_map = 0;
  std::int64_t by_rank = 0;
  std::int64_t first_of_rank = 0;
  std::int64_t absent = 0;
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
    absent = reserve(2 * plan.num_ranks * std::int64_t{sizeof(layout::Word)});
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

// Together with the other ranks.
CudaBuffer::CudaBuffer(const std::shared_ptr<runtime::Bootstrap>& bootstrap,
                       const runtime::BufferPlan& plan)
    : plan_(plan),
      variant_(variant_for(bootstrap->network() != nullptr,
                           plan.options.on_timeout == OnTimeout::kMask)) {
  DeviceFacts own{};
  runtime::agree(*bootstrap, [&] {
    require_supported(bootstrap.get());
    own = prepare_device();
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
    choose_blocks(own, facts);
    return 0;
  });
  peers_ = runtime::agree(*bootstrap, [&] {
    return std::make_unique<PeerMemory>(bootstrap, block_, device_, facts, plan.num_ranks);
  });
  if (has_door()) peers_->open_to_others();
  const auto kind = has_door() ? runtime::SymmetricMemory::Kind::kAlwaysFile
                               : runtime::SymmetricMemory::Kind::kPlain;
  auto membership = std::make_unique<runtime::Membership>(*bootstrap, plan.num_ranks,
                                                          plan.options.first_epoch, kind);
  runtime::agree(*bootstrap, [&] {
    if (has_elsewhere(variant_)) {
      relay_ = std::make_unique<Relay>(device_, plan, *bootstrap, block_,
                                       [this] { return fatal_failure(); });
      relay_->fill(view_);
    }
    make_roster(std::move(membership));
    fill_control(plan.options.first_epoch - 1);
    fill_tables(plan.options.first_epoch);
    warm_up();
    return 0;
  });
  if (relay_) relay_->start();
  start_watch();
}

// Of a process that joins a running buffer; recover() lets it in.
CudaBuffer::CudaBuffer(const runtime::BufferPlan& plan, runtime::Descriptor board)
    : plan_(plan), variant_(Variant::kWatched) {
  require_supported(nullptr);
  const DeviceFacts own = prepare_device();
  choose_blocks(own, {own});
  peers_ = std::make_unique<PeerMemory>(block_, device_, plan.rank, plan.num_ranks);
  peers_->open_to_others();
  make_roster(std::make_unique<runtime::Membership>(std::move(board), plan.rank, plan.num_ranks));
  const layout::Epoch near = roster_->take_over();
  fill_control(near - 2);
  fill_tables(near);
  warm_up();
  start_watch();
}

// `bootstrap`: null for a process that joins.
void CudaBuffer::require_supported(const runtime::Bootstrap* bootstrap) const {
  const BufferOptions& options = plan_.options;
  if (options.num_experts > kMaxExperts) {
    throw Error(ErrorCode::kUnsupported, "num_experts is " + std::to_string(options.num_experts) +
                                             ", on CUDA at most " + std::to_string(kMaxExperts));
  }
  const bool masks = options.on_timeout == OnTimeout::kMask;
  const bool grows = bootstrap != nullptr && plan_.num_ranks != bootstrap->size();
  if (!has_door() && !grows) return;
  if (has_elsewhere(variant_)) {
    throw Error(ErrorCode::kUnsupported,
                "door and max_ranks: ranks on GPUs of several hosts cannot be replaced or added "
                "yet");
  }
  if (!masks) {
    throw Error(ErrorCode::kUnsupported,
                "door and max_ranks: ranks on GPUs are replaced and added where those that are "
                "missed are masked (on_timeout mask)");
  }
  if (bootstrap != nullptr && bootstrap->in_one_process() && bootstrap->size() > 1) {
    throw Error(ErrorCode::kUnsupported,
                "door and max_ranks: ranks on GPUs that are threads of one process cannot be "
                "replaced or added; processes can");
  }
}

void CudaBuffer::make_roster(std::unique_ptr<runtime::Membership> membership) {
  layout::Doorbell& doorbell = relay_ ? relay_->doorbell() : doorbell_;
  roster_ = std::make_unique<runtime::Roster>(
      plan_, runtime::Waiter(doorbell, plan_.options.timeout, plan_.num_ranks),
      relay_ ? &relay_->peers() : nullptr, std::move(membership),
      runtime::RosterEvents{.ring = [this] { stop_if_failed(); },
                            .forget = [](std::span<const int>) {},
                            .meet = [this](int rank) { return meet(rank); }},
      runtime::Leads{.mask = kLead, .unmask = kLead});
  if (relay_) relay_->set_newest_view([roster = roster_.get()] { return roster->newest(); });
}

// What needs no peer: the device, its limits, memory.
DeviceFacts CudaBuffer::prepare_device() {
  device_ = resolve_device(plan_.options.device);
  const DeviceScope scope(device_);
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
  if (properties.major < 8) {
    throw Error(ErrorCode::kUnsupported,
                std::string(properties.name) + " is older than compute capability 8.0");
  }
  num_sms_ = properties.multiProcessorCount;
  cache_bytes_ = properties.l2CacheSize;
  DeviceFacts own{};
  std::memcpy(own.uuid, &properties.uuid, sizeof own.uuid);
  own.device = device_;
  own.num_sms = num_sms_;
  own.chosen_blocks = plan_.options.num_sms;
  const int num_experts = plan_.options.num_experts;
  shared_bytes_ = std::max(
      {dispatch_shared_bytes(plan_.num_ranks, num_experts, has_elsewhere(variant_)),
       receive_shared_bytes(plan_.num_ranks, num_experts), combine_shared_bytes(plan_.num_ranks),
       stage_shared_bytes(plan_.num_ranks), kLeastSharedBytes});
  if (shared_bytes_ > static_cast<std::int64_t>(properties.sharedMemPerBlockOptin)) {
    throw Error(ErrorCode::kUnsupported,
                std::to_string(num_experts) + " experts and " + std::to_string(plan_.num_ranks) +
                    " ranks need " + std::to_string(shared_bytes_) + " bytes of shared memory, " +
                    properties.name + " has " + std::to_string(properties.sharedMemPerBlockOptin));
  }
  for (const void* kernel : all_kernels(variant_)) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes_)),
               "cudaFuncSetAttribute");
  }
  // Who may join later may be on another device.
  if (has_door()) view_.across_devices = 1;
  allocate();
  return own;
}

void CudaBuffer::allocate() {
  const Pieces pieces(plan_);
  block_ = allocate_device(
      device_, layout::round_up(plan_.block.size_bytes(), plan_.num_ranks > 1 ? kIpcUnit : 1));
  own_memory_ = allocate_device(device_, pieces.size_bytes);
  record_memory_ = allocate_mapped_host(device_, sizeof(ErrorRecord));
  record_ = new (record_memory_.get()) ErrorRecord();
  prepare_host_copies(device_);
  for (cudaEvent_t& event : events_) {
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  allocate_staging();
  if (is_watched()) allocate_watch();
  check_cuda(cudaStreamCreateWithFlags(&side_stream_, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");

  std::byte* const base = own_memory_.get();
  view_.block = plan_.block;
  view_.blocks = reinterpret_cast<std::byte* const*>(base + pieces.blocks);
  view_.expert_map = reinterpret_cast<const std::uint32_t*>(base + pieces.expert_map);
  view_.by_rank = reinterpret_cast<const std::int32_t*>(base + pieces.by_rank);
  view_.first_of_rank = reinterpret_cast<const std::int32_t*>(base + pieces.first_of_rank);
  view_.state = reinterpret_cast<DeviceState*>(base + pieces.state);
  watch_view_.absent = reinterpret_cast<layout::Word*>(base + pieces.absent);
  void* record_on_device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&record_on_device, record_, 0), "cudaHostGetDevicePointer");
  view_.record = static_cast<ErrorRecord*>(record_on_device);
  const auto timeout = plan_.options.timeout;
  view_.timeout_ns = timeout == BufferOptions::kForever
                         ? ~std::uint64_t{0}
                         : static_cast<std::uint64_t>(timeout.count());
  if (is_watched() && view_.timeout_ns < ~std::uint64_t{0} / kPatience) {
    view_.timeout_ns *= kPatience;
  }
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
}

// Control words of before the first epoch, so that none is taken for a fresh one.
void CudaBuffer::fill_control(layout::Epoch before) {
  const DeviceScope scope(device_);
  std::vector<layout::Word> control(
      static_cast<std::size_t>(plan_.block.control_bytes()) / sizeof(layout::Word),
      layout::make_word(before, 0));
  // Until somebody says otherwise, those take part who are there from the beginning.
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    control[static_cast<std::size_t>(plan_.block.roster(rank)) / sizeof(layout::Word)] =
        layout::make_word(plan_.options.first_epoch,
                          roster_->is_active(rank) ? 0 : layout::kRosterMasked);
  }
  control[static_cast<std::size_t>(plan_.block.at_work()) / sizeof(layout::Word)] = 0;
  check_cuda(cudaMemcpy(block_.get(), control.data(), control.size() * sizeof(layout::Word),
                        cudaMemcpyHostToDevice),
             "cudaMemcpy");
}

void CudaBuffer::fill_tables(layout::Epoch first) {
  const DeviceScope scope(device_);
  const Pieces pieces(plan_);
  std::vector<std::byte> image(static_cast<std::size_t>(pieces.trace));
  DeviceState states[2];
  states[0] = first_state(first, runtime::kFirstGeneration);
  states[1].failed = 1;  // kernels that warm up end at once
  std::memcpy(image.data() + pieces.state, states, sizeof states);
  for (int rank = 0; rank < plan_.num_ranks; ++rank) {
    std::byte* block = peers_->block(rank);
    if (block == nullptr && relay_) block = relay_->outbox();
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
// Who may join later is taken to share the device.
void CudaBuffer::choose_blocks(const DeviceFacts& own, const std::vector<DeviceFacts>& facts) {
  const auto shares_device = [&own](const DeviceFacts& peer) {
    return std::memcmp(peer.uuid, own.uuid, sizeof own.uuid) == 0;
  };
  const int absent = plan_.num_ranks - static_cast<int>(facts.size());
  const auto sharers =
      static_cast<int>(std::count_if(facts.begin(), facts.end(), shares_device)) + absent;
  const int share = std::max(1, num_sms_ / sharers);
  int wanted = absent * (own.chosen_blocks > 0 ? own.chosen_blocks : share);
  for (const DeviceFacts& peer : facts) {
    if (!shares_device(peer)) continue;
    wanted += peer.chosen_blocks > 0 ? peer.chosen_blocks : share;
  }
  if (wanted > num_sms_) {
    throw Error(ErrorCode::kInvalidArgument,
                "the " + std::to_string(sharers) + " ranks on CUDA device " +
                    std::to_string(device_) + " ask for " + std::to_string(wanted) +
                    " multiprocessors in all (num_sms, or a share of at least one), it has " +
                    std::to_string(num_sms_));
  }
  most_blocks_ = std::min(kMaxBlocks, std::max(share, plan_.options.num_sms));
  default_blocks_ = std::min(kMaxBlocks, share >= 16 ? share / 8 * 8 : share);
  cache_share_ = cache_bytes_ / 2 / sharers;
}

runtime::Offer CudaBuffer::offer() const {
  return {.num_ranks = plan_.num_ranks,
          .options = {},
          .block = offer_block(block_),
          .board = roster_->board().duplicate()};
}

void CudaBuffer::warm_up() {
  const DeviceScope scope(device_);
  DispatchParams dispatch;
  dispatch.buffer = view_;
  dispatch.buffer.state = view_.state + 1;
  dispatch.topk = 1;
  CombineParams combine;
  combine.buffer = dispatch.buffer;
  for (const void* kernel : all_kernels(variant_)) {
    const bool combines = is_of_combine(kernel);
    const void* params =
        combines ? static_cast<const void*>(&combine) : static_cast<const void*>(&dispatch);
    launch(kernel, params, 1, nullptr);
  }
  check_cuda(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
}

}  // namespace tandem::cuda
