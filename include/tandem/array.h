// Array: a tensor in memory that a backend's buffers can read and write, with copies to and from
// the host. For code that has no tensor framework at hand: tests, examples, the command-line tool.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "tandem/tensor.h"
#include "tandem/types.h"

namespace tandem {

class Array {
 public:
  Array() = default;

  // Uninitialised memory: ordinary for kCpu, of device `device` (-1: the current one) for kCuda.
  // Throws kResource with the bytes asked and available, kUnsupported where the backend is missing.
  Array(Backend backend, DType dtype, std::initializer_list<std::int64_t> shape, int device = -1);

  [[nodiscard]] TensorView view() const { return view_; }
  operator TensorView() const { return view_; }       // NOLINT: implicit by intent
  operator ConstTensorView() const { return view_; }  // NOLINT: implicit by intent

 private:
  TensorView view_;
  std::shared_ptr<void> memory_;
};

// Copies between tensors of one dtype and shape, in whichever memory each lies (strides as they
// are), on `stream` (CUDA), and waits for it to end. Host memory is any that the process can read.
// Throws kInvalidArgument where dtype or shape differ.
void copy(TensorView destination, ConstTensorView source, Backend backend, void* stream = nullptr);

}  // namespace tandem
