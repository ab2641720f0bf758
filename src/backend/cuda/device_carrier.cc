#include "backend/cuda/device_carrier.h"

#include <algorithm>
#include <cstring>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "backend/cuda/outbox.h"
#include "tandem/error.h"

namespace tandem::cuda {

using layout::Word;

cudaStream_t make_copy_stream() {
  // Of the highest priority, so that it shares no hardware queue with kernels that wait for it.
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
             "cudaStreamCreateWithPriority");
  return stream;
}

DeviceCarrier::DeviceCarrier(int device, const runtime::BufferPlan& plan,
                             const std::vector<int>& remote, std::shared_ptr<std::byte> block)
    : device_(device),
      layout_(plan.block),
      block_(std::move(block)),
      sources_(static_cast<std::size_t>(plan.num_ranks)) {
  const DeviceScope scope(device_);
  const layout::Capacity& capacity = plan.block.capacity();
  const std::int64_t rows = Outbox::most_rows(capacity);
  // A message has one row at least, whose source token takes 16 bytes at most with its padding.
  room_bytes_ = rows * (capacity.dispatch_pitch + layout::kRowAlignment);
  landing_bytes_ = capacity.combine_rows == 0 ? 0 : rows * capacity.combine_pitch;
  rooms_ = allocate_mapped_host(device_, 2 * room_bytes_ * std::ssize(remote));
  landing_ = allocate_mapped_host(device_, std::max<std::int64_t>(2 * landing_bytes_, 1));
  words_ = allocate_mapped_host(device_, layout_.control_bytes());
  one_ = allocate_mapped_host(device_, sizeof(std::uint32_t));
  const std::uint32_t one = 1;
  std::memcpy(one_.get(), &one, sizeof one);
  std::byte* next = rooms_.get();
  for (const int rank : remote) {
    for (Room& room : sources_[rank].rooms) {
      room = {.memory = next, .epoch = plan.options.first_epoch - 1, .used = 0};
      next += room_bytes_;
    }
  }
  device_landing_ = allocate_device(device_, 2 * landing_bytes_);
  const std::int64_t lost_bytes = plan.num_ranks * std::int64_t{sizeof(std::uint32_t)};
  device_memory_ = allocate_device(device_, lost_bytes);
  device_lost_ = reinterpret_cast<std::uint32_t*>(device_memory_.get());
  check_cuda(cudaMemset(device_lost_, 0, static_cast<std::size_t>(lost_bytes)), "cudaMemset");
  stream_ = make_copy_stream();
}

DeviceCarrier::~DeviceCarrier() {
  int device_before = device_;
  warn_cuda(cudaGetDevice(&device_before), "cudaGetDevice");
  warn_cuda(cudaSetDevice(device_), "cudaSetDevice");
  warn_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  warn_cuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  warn_cuda(cudaSetDevice(device_before), "cudaSetDevice");
}

std::byte* DeviceCarrier::room(int source, layout::Epoch epoch, std::int64_t size_bytes) {
  // The rows of two operations before have been copied: their source has this rank's `completed`.
  Room& room = sources_[source].rooms[layout::parity(epoch)];
  if (room.memory == nullptr) return nullptr;
  if (room.epoch != epoch) {
    room.epoch = epoch;
    room.used = 0;
  }
  const std::int64_t needed = layout::round_up(size_bytes, layout::kRowAlignment);
  if (needed > room_bytes_ - room.used) return nullptr;
  std::byte* const memory = room.memory + room.used;
  room.used += needed;
  return memory;
}

void DeviceCarrier::carry_to_block(const Rows& rows) {
  copy(block_.get() + rows.offset, rows.room, rows.size_bytes);
  copy(block_.get() + rows.sources_offset, rows.room + rows.size_bytes, rows.sources_bytes);
}

void DeviceCarrier::carry_to_landing(std::int64_t offset, std::int64_t size_bytes) {
  copy(device_landing_.get() + offset, landing_.get() + offset, size_bytes);
}

void DeviceCarrier::carry_words(int source, std::int64_t offset, std::span<const Word> words) {
  if (offset == layout_.completed(source) && words.size() == 1) {
    const std::lock_guard lock(held_mutex_);
    sources_[source].completed = words[0];
    release_completed(source);
    return;
  }
  for (std::size_t i = 0; i < words.size(); ++i) {
    // Relaxed: who reads them has been told by a kernel that waited for the copy.
    std::atomic_ref(*(reinterpret_cast<Word*>(words_.get() + offset) + i))
        .store(words[i], std::memory_order_relaxed);
  }
  copy_words(offset, static_cast<std::int64_t>(words.size_bytes()));
}

void DeviceCarrier::set_has_left(std::function<bool(int, int)> has_left) {
  const std::lock_guard lock(held_mutex_);
  has_left_ = std::move(has_left);
}

void DeviceCarrier::release_completed(int source) {
  std::optional<Word>& held = sources_[source].completed;
  if (!held || !has_left_ || !has_left_(source, layout::parity(layout::epoch_of(*held)))) return;
  const std::int64_t offset = layout_.completed(source);
  // An earlier one that has not been copied yet becomes this one: it only grows.
  std::atomic_ref(*reinterpret_cast<Word*>(words_.get() + offset))
      .store(*held, std::memory_order_relaxed);
  held.reset();
  copy_words(offset, sizeof(Word));
}

void DeviceCarrier::wake() {
  {
    const std::lock_guard lock(held_mutex_);
    for (std::size_t source = 0; source < sources_.size(); ++source) {
      release_completed(static_cast<int>(source));
    }
  }
  runtime::fence(std::memory_order_seq_cst);  // pairs with that of whoever falls asleep
  runtime::ring(doorbell_);
}

void DeviceCarrier::forget() {
  const std::lock_guard lock(held_mutex_);
  for (Source& source : sources_) source.completed.reset();
}

void DeviceCarrier::await_copies() const {
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void DeviceCarrier::lost(int peer) {
  copy(reinterpret_cast<std::byte*>(device_lost_ + peer), one_.get(), sizeof(std::uint32_t));
}

void DeviceCarrier::copy_words(std::int64_t offset, std::int64_t size_bytes) {
  copy(block_.get() + offset, words_.get() + offset, size_bytes);
}

void DeviceCarrier::copy(std::byte* to, const std::byte* from, std::int64_t size_bytes) {
  if (size_bytes == 0) return;
  try {
    const DeviceScope scope(device_);
    check_cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(size_bytes),
                               cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync");
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    if (problem_.empty()) problem_ = error.message();
  }
}

Word DeviceCarrier::word(std::int64_t offset) const {
  return std::atomic_ref(*reinterpret_cast<Word*>(words_.get() + offset))
      .load(std::memory_order_relaxed);
}

std::optional<std::string> DeviceCarrier::problem() const {
  const std::lock_guard lock(mutex_);
  if (problem_.empty()) return {};
  return problem_;
}

}  // namespace tandem::cuda
