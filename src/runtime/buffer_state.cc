#include "runtime/buffer_state.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "core/validation.h"
#include "runtime/agreement.h"
#include "runtime/deadline.h"
#include "runtime/failure.h"
#include "runtime/network.h"

namespace tandem::runtime {
BufferPlan make_plan(const BufferOptions& options, int rank, int num_present) {
  if (options.max_ranks != 0 && options.max_ranks < num_present) {
    throw Error(ErrorCode::kInvalidArgument, "max_ranks is " + std::to_string(options.max_ranks) +
                                                 ", must be 0 or at least the number of ranks, " +
                                                 std::to_string(num_present));
  }
  const int num_ranks = std::max(options.max_ranks, num_present);
  core::validate(options, num_ranks);
  const BackendInterface& interface = backend(options.backend);
  core::ExpertMap experts = core::make_expert_map(options, num_ranks);
  const layout::Capacity capacity =
      core::make_capacity(options, experts, interface.num_arrival_words());
  return {options, rank, num_ranks, std::move(experts), layout::Block(capacity)};
}

BufferState::BufferState(const Communicator& communicator, const BufferOptions& options,
                         Faults* faults)
    : bootstrap_(communicator.bootstrap()) {
  // A rank whose options are refused tells its peers, so that all fail at once instead of waiting.
  plan_ = agree(*bootstrap_,
                [&] { return make_plan(options, bootstrap_->rank(), bootstrap_->size()); });
  plan_.faults = faults;
  require_same_options(*bootstrap_, options);
  if (!options.door.empty() && bootstrap_->network() == nullptr) {
    door_ = agree(*bootstrap_, [&] {
      return std::make_unique<Door>(options.door, bootstrap_->rank(), Seam(faults));
    });
  }
  backend_ = backend(options.backend).make_buffer(bootstrap_, plan_);
  open_door();
}

namespace {

void validate_joining(int rank, const BufferOptions& options) {
  if (options.door.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "door is empty: a buffer is joined by its door's name");
  }
  if (rank < 0 || rank >= kMaxRanks) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "rank is " + std::to_string(rank) + ", must be in [0, " + std::to_string(kMaxRanks) + ")");
  }
}

}  // namespace

BufferState::BufferState(int rank, const BufferOptions& options, Faults* faults) {
  validate_joining(rank, options);
  // In this order: once somebody offers, every rank of the buffer has claimed its own door.
  const Seam seam(faults);
  seam.pass(Point::kSeeking);
  Offer offer = find_offer(rank, options);
  plan_ = make_plan(options, rank, offer.num_ranks);
  plan_.faults = faults;
  require_rank(rank);
  seam.pass(Point::kClaiming);
  door_ = std::make_unique<Door>(options.door, rank, seam);
  seam.pass(Point::kClaimed);
  backend_ = backend(options.backend).join_buffer(plan_, std::move(offer));
  open_door();
  static_cast<void>(recover());
}

BufferState::BufferState(int rank, const BufferOptions& options, const Entrance& entrance,
                         Faults* faults) {
  validate_joining(rank, options);
  if (network() == nullptr) {
    throw Error(
        ErrorCode::kUnsupported,
        "this build of the library has no network (TANDEM_NET), so no ranks on other hosts");
  }
  Seam(faults).pass(Point::kSeeking);
  Offer offer = find_offer(rank, options, entrance);
  plan_ = make_plan(options, rank, offer.num_ranks);
  plan_.faults = faults;
  require_rank(rank);
  backend_ = backend(options.backend).join_buffer(plan_, std::move(offer));
  static_cast<void>(recover());
}

Offer BufferState::find_offer(int rank, const BufferOptions& options, const Entrance& entrance) {
  const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(options.timeout);
  Invitation invitation = network()->visit(entrance.address, entrance.secret, rank, timeout);
  std::optional<Situation> situation = decode_situation(invitation.situation);
  if (!situation) {
    throw Error(ErrorCode::kMismatch,
                "the door at " + entrance.address + " is one of another version of Tandem");
  }
  require_same_options(situation->teller, situation->options, rank, options);
  return {.num_ranks = situation->num_ranks(),
          .options = {},
          .block = {},
          .board = {},
          .network = std::move(invitation.network),
          .situation = std::move(*situation)};
}

// Any rank's door will do: they have the same board. Doors that are not there are passed over at
// once.
Offer BufferState::find_offer(int rank, const BufferOptions& options) {
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(options.timeout);
  const Deadline deadline = Deadline::after(wait);
  do {
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      if (peer == rank) continue;
      std::optional<Offer> offer = visit_door(options.door, peer, options.timeout);
      if (!offer) continue;
      require_same_options(peer, offer->options, rank, options);
      return std::move(*offer);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } while (!deadline.passed());
  throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                        .phase = Phase::kSetup,
                        .waited = options.timeout,
                        .limit = options.timeout},
              "nobody opens a door of '" + options.door + "'");
}

void BufferState::open_door() {
  if (door_ == nullptr) return;
  Offer offer = backend_->offer();
  offer.options = describe_options(plan_.options);
  door_->open(std::move(offer));
}

void BufferState::require_sound() const {
  if (!failure_) return;
  ErrorInfo info = failure_->info();
  info.code = ErrorCode::kFailedBuffer;
  throw Error(info, "an earlier operation failed: " + std::string(failure_->what()));
}

template <typename Action>
void BufferState::guarded(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    if (!leaves_buffer_sound(error.code())) failure_ = error;
    throw;
  }
}

template <typename Receive>
Hook BufferState::make_hook(std::uint64_t operation, Receive receive) {
  return Hook([weak = weak_from_this(), operation, receive = std::move(receive),
               done = std::make_shared<bool>(false)] {
    if (*done) return;
    const std::shared_ptr<BufferState> self = weak.lock();
    if (self == nullptr) throw Error(ErrorCode::kOrder, "the hook's buffer is gone");
    self->require_sound();
    self->sequence_.require_oldest(operation);
    *done = true;
    self->sequence_.record_received();  // also where it is refused: the operation is over
    self->guarded([&] { receive(*self->backend_); });
  });
}

DispatchResult BufferState::dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                     const DispatchOptions& options) {
  require_sound();
  const core::DispatchArguments arguments =
      core::validate_dispatch(x, topk_idx, options, plan_.options, num_local_experts(),
                              plan_.num_ranks, plan_.block.capacity());
  const auto handle = std::make_shared<HandleState>();
  handle->buffer = weak_from_this();
  handle->dispatch = {sequence_.next_id(), sequence_.choose_half(options.return_hook)};
  handle->rows = arguments.rows;
  handle->call = {.x = x,
                  .topk_idx = topk_idx,
                  .row = arguments.row,
                  .num_tokens = arguments.num_tokens,
                  .topk = arguments.topk,
                  .max_tokens = arguments.max_tokens,
                  .placement = arguments.placement,
                  .layout = options.layout,
                  .row_alignment = options.layout == Layout::kPacked ? options.row_alignment : 1,
                  .topk_weights = options.topk_weights,
                  .half = handle->dispatch.half,
                  .id = handle->dispatch.id,
                  .recv_x = options.recv_x,
                  .recv_scales = options.recv_scales,
                  .stream = options.stream,
                  .num_sms = options.num_sms};

  try {
    guarded([&] {
      backend_->dispatch(handle->call, options.return_hook ? Stage::kSend : Stage::kBoth);
    });
  } catch (const Error& error) {
    // It was sent before it was refused, and has overwritten what an earlier handle knew.
    if (error.code() == ErrorCode::kCapacity) {
      static_cast<void>(sequence_.record_dispatch(handle->dispatch.half, false));
    }
    throw;
  }
  handle->active = backend_->participants();
  const std::uint64_t operation =
      sequence_.record_dispatch(handle->dispatch.half, options.return_hook);

  DispatchResult result = make_result(handle);
  if (options.return_hook) {
    result.hook = make_hook(operation, [handle](BackendBuffer& end) {
      handle->failed = true;
      end.dispatch(handle->call, Stage::kReceive);
      handle->failed = false;
      handle->active = end.participants();
    });
  }
  return result;
}

DispatchResult BufferState::make_result(const std::shared_ptr<HandleState>& handle) const {
  const DispatchCall& call = handle->call;
  const HandleArrays arrays = backend_->handle_arrays(call.half);
  const std::int64_t num_local = num_local_experts();
  DispatchResult result;
  result.handle = DispatchHandle(handle);
  result.counts = view_of(arrays.counts, {num_local});
  result.offsets = view_of(arrays.offsets, {num_local + 1});
  result.ranges = view_of(arrays.ranges, {num_local, plan_.num_ranks});
  if (call.placement == Placement::kSlotted) {
    result.x = call.recv_x;
    result.scales = call.recv_scales;
    result.source_tokens = view_of(arrays.source_tokens, {handle->rows.total()});
    return result;
  }
  std::byte* const block = backend_->own_block();
  std::byte* const rows = block + plan_.block.view_rows(call.half);
  const auto shape = [&](std::byte* data, DType dtype, std::int64_t width) {
    return core::result_view(data, dtype, width, call.row.pitch() / size_of(dtype), handle->rows);
  };
  result.x = shape(rows, value_dtype(call.row.format), call.row.hidden);
  if (is_fp8(call.row.format)) {
    result.scales = shape(rows + call.row.scales_offset(),
                          call.row.format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32,
                          call.row.num_scales());
  }
  result.source_tokens =
      view_of(reinterpret_cast<std::int32_t*>(block + plan_.block.view_sources(call.half)),
              {handle->rows.total()});
  return result;
}

HandleState& BufferState::require_handle(const DispatchHandle& handle) const {
  if (!handle) throw Error(ErrorCode::kInvalidArgument, "handle is empty");
  HandleState& state = *handle.state();
  if (state.buffer.lock().get() != this) {
    throw Error(ErrorCode::kInvalidArgument, "handle is of another buffer");
  }
  if (state.failed) {
    throw Error(ErrorCode::kStaleHandle, "the handle's dispatch was refused; it received nothing");
  }
  return state;
}

TensorView BufferState::combine_view(const HandleState& handle, DType dtype,
                                     std::int64_t hidden) const {
  return core::result_view(
      backend_->own_block() + plan_.block.combine_rows(handle.dispatch.half), dtype, hidden,
      layout::combine_pitch(static_cast<int>(hidden), dtype) / size_of(dtype), handle.rows);
}

bool BufferState::lies_in_combine_region(const ConstTensorView& y) const {
  const auto* const data = static_cast<const std::byte*>(y.data);
  const std::byte* const block = backend_->own_block();
  const layout::Capacity& capacity = plan_.block.capacity();
  const std::int64_t bytes = capacity.combine_rows * capacity.combine_pitch;
  for (int half = 0; half < layout::kNumHalves; ++half) {
    const std::byte* const region = block + plan_.block.combine_rows(half);
    if (!std::less<>{}(data, region) && std::less<>{}(data, region + bytes)) return true;
  }
  return false;
}

TensorView BufferState::next_combine_buffer(const DispatchHandle& handle, DType dtype) {
  require_sound();
  HandleState& state = require_handle(handle);
  core::validate_combine_dtype(dtype, plan_.options);
  sequence_.require_received(state.dispatch);
  const int half = state.dispatch.half;
  if (!sequence_.is_reserved(half)) {
    guarded([&] { backend_->acquire_combine_half(half); });
    sequence_.reserve(half, handle.state());
  }
  return combine_view(state, dtype, state.call.row.hidden);
}

void BufferState::reserve_unwritten(const DispatchHandle& handle) {
  require_sound();
  const HandleState& state = require_handle(handle);
  sequence_.require_received(state.dispatch);
  sequence_.reserve(state.dispatch.half, handle.state());
}

Hook BufferState::combine(const ConstTensorView& y, const ConstTensorView& topk_weights,
                          const DispatchHandle& handle, const TensorView& out,
                          const CombineOptions& options) {
  require_sound();
  HandleState& state = require_handle(handle);
  const int half = state.dispatch.half;
  core::validate_combine(y, topk_weights, out,
                         {.num_tokens = state.call.num_tokens,
                          .topk = state.call.topk,
                          .rows = state.rows,
                          .partial_sums = state.call.partial_sums()},
                         plan_.options);
  sequence_.require_combine(state.dispatch, options.return_hook);

  CombineCall call{.y = y,
                   .weights = topk_weights,
                   .out = out,
                   .dtype = y.dtype,
                   .hidden = static_cast<std::int32_t>(y.shape[y.num_dims - 1]),
                   .dispatch = state.call,
                   .stream = options.stream,
                   .num_sms = options.num_sms};
  if (y.num_elements() > 0 && lies_in_combine_region(y)) {
    const TensorView own = combine_view(state, y.dtype, call.hidden);
    if (!sequence_.is_reserved(half) || y.data != own.data || y.strides != own.strides) {
      throw Error(ErrorCode::kInvalidArgument,
                  "y lies in the combine region but is not the view that next_combine_buffer gives "
                  "for this handle; ask for it again before each zero-copy combine");
    }
    call.zero_copy = true;
  }

  guarded([&] { backend_->combine(call, options.return_hook ? Stage::kSend : Stage::kBoth); });
  state.active = backend_->participants();
  const std::uint64_t operation = sequence_.record_combine(half, options.return_hook);
  if (!options.return_hook) return {};
  return make_hook(operation, [call, handle = handle.state()](BackendBuffer& end) {
    end.combine(call, Stage::kReceive);
    handle->active = end.participants();
  });
}

void BufferState::mask(int rank) {
  require_sound();
  require_rank(rank);
  guarded([&] { backend_->mask(rank); });
}

void BufferState::unmask(int rank) {
  require_sound();
  require_rank(rank);
  guarded([&] { backend_->unmask(rank); });
}

std::vector<bool> BufferState::recover() {
  backend_->recover();
  failure_.reset();
  sequence_.restart();
  return backend_->active();
}

void BufferState::require_rank(int rank) const {
  if (rank >= 0 && rank < plan_.num_ranks) return;
  throw Error(ErrorCode::kInvalidArgument, "rank is " + std::to_string(rank) +
                                               "; it must be in [0, " +
                                               std::to_string(plan_.num_ranks) + ")");
}

void BufferState::check() {
  require_sound();
  guarded([&] { backend_->check(); });
}

}  // namespace tandem::runtime
