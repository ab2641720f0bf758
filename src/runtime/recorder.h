// Recorder: operations of one rank, put down once and run again and again, with the time that each
// run takes. What `tandem bench` measures with, on any backend: on a GPU a recording is a captured
// graph, on CPUs the calls themselves.
//
// Ranks that are threads on one GPU record, and wait for the end of a run, only while no peer waits
// for a launch of theirs: between barriers (docs/design.md, "One GPU, many ranks").
//
// Thread safety: one caller at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tandem/buffer.h"
#include "tandem/tensor.h"
#include "tandem/types.h"

namespace tandem::runtime {

// Where a rank computes.
struct DeviceSummary {
  std::string name;             // "NVIDIA H200"
  int num_devices = 1;          // like it, here
  int num_sms = 0;              // multiprocessors; 0: has none
  std::int64_t free_bytes = 0;  // memory that is free now
};

// How long a run took, in microseconds.
struct RunTime {
  double all_us = 0;          // from before the first operation to after the last
  double after_first_us = 0;  // from after the first operation: without waiting for late starters
};

class Recorder {
 public:
  virtual ~Recorder() = default;

  // The stream that recorded operations must be given.
  [[nodiscard]] virtual void* stream() const = 0;

  // Records `count` calls of `operation` (at least one), which may be called any number of times,
  // now or later, as long as this object lives. Returns the recording's number.
  virtual int record(int count, std::function<void()> operation) = 0;

  // Copies rows [N, H] of one tensor to another of the same dtype and shape, both in the backend's
  // memory. On a GPU it is queued on the stream, so that an operation that is recorded may call it.
  virtual void copy_rows(const TensorView& to, const ConstTensorView& from) = 0;

  // Starts a run. On a GPU it is queued on the stream.
  virtual void start(int recording) = 0;

  // Waits for the run that was started last.
  virtual RunTime finish() = 0;

  [[nodiscard]] virtual DeviceSummary device() const = 0;

  // The median rate of several copies of so many bytes within the device's memory, in 1e9 bytes a
  // second: bytes read and bytes written both count. Allocates twice the bytes.
  [[nodiscard]] virtual double copy_gbs(std::int64_t size_bytes) = 0;
};

// Throws kUnsupported, saying why, where the backend is missing. `device` as in BufferOptions.
std::unique_ptr<Recorder> make_recorder(Backend which, int device);

// Spreads ranks over devices: the calling thread, which is rank `number`, computes on that device
// from now on where it names none (they are counted round and round).
void use_device(Backend which, int number);

// For combines of one handle repeated in order to time them alone: as next_combine_buffer, but for
// a caller that writes nothing to the view, so that nobody needs to wait until peers have read it.
// (A dispatch and its zero-copy combine never wait there; two combines of one handle would.)
void reserve_unwritten(const DispatchHandle& handle);

}  // namespace tandem::runtime
