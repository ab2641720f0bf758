// The public Buffer: forwards to BufferState.
#include "tandem/buffer.h"

#include "runtime/buffer_state.h"

namespace tandem {
namespace {

runtime::BufferState& require(const std::shared_ptr<runtime::BufferState>& state) {
  if (state == nullptr) throw Error(ErrorCode::kInvalidArgument, "the buffer was moved from");
  return *state;
}

}  // namespace

std::vector<bool> DispatchHandle::active() const {
  if (state_ == nullptr) throw Error(ErrorCode::kInvalidArgument, "the handle is empty");
  const std::shared_ptr<runtime::BufferState> buffer = state_->buffer.lock();
  return buffer == nullptr ? state_->active : buffer->participants_of(*state_);
}

Buffer::Buffer(const Communicator& communicator, const BufferOptions& options)
    : state_(std::make_shared<runtime::BufferState>(communicator, options)) {}

Buffer Buffer::join(int rank, const BufferOptions& options) {
  return Buffer(std::make_shared<runtime::BufferState>(rank, options));
}

Buffer Buffer::join_across_hosts(const std::string& address, const std::string& secret, int rank,
                                 const BufferOptions& options) {
  return Buffer(std::make_shared<runtime::BufferState>(
      rank, options, runtime::BufferState::Entrance{.address = address, .secret = secret}));
}

Buffer::~Buffer() = default;
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;

std::int64_t Buffer::size_bytes(const BufferOptions& options, int num_ranks) {
  return runtime::make_plan(options, 0, num_ranks).block.size_bytes();
}

const BufferOptions& Buffer::options() const { return require(state_).plan().options; }
int Buffer::rank() const { return require(state_).plan().rank; }
int Buffer::num_ranks() const { return require(state_).plan().num_ranks; }
int Buffer::num_local_experts() const { return require(state_).num_local_experts(); }

std::vector<int> Buffer::local_experts() const {
  const std::span<const std::int32_t> experts = require(state_).plan().experts.experts_of(rank());
  return {experts.begin(), experts.end()};
}

std::int64_t Buffer::capacity_rows() const { return require(state_).plan().block.capacity().rows; }

DispatchResult Buffer::dispatch(ConstTensorView x, ConstTensorView topk_idx,
                                const DispatchOptions& options) {
  return require(state_).dispatch(x, topk_idx, options);
}

TensorView Buffer::next_combine_buffer(const DispatchHandle& handle, DType dtype) {
  return require(state_).next_combine_buffer(handle, dtype);
}

Hook Buffer::combine(ConstTensorView y, ConstTensorView topk_weights, const DispatchHandle& handle,
                     TensorView out, const CombineOptions& options) {
  return require(state_).combine(y, topk_weights, handle, out, options);
}

void Buffer::mask(int rank) { require(state_).mask(rank); }
void Buffer::unmask(int rank) { require(state_).unmask(rank); }
std::vector<bool> Buffer::recover() { return require(state_).recover(); }
std::vector<int> Buffer::waiting() const { return require(state_).waiting(); }
std::vector<bool> Buffer::active() const { return require(state_).active(); }
std::optional<Error> Buffer::last_loss() const { return require(state_).last_loss(); }

void Buffer::check() { require(state_).check(); }
void* Buffer::last_event() const { return require(state_).last_event(); }

}  // namespace tandem
