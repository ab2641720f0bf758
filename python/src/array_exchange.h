// Arrays of any framework on their way in: what an operation needs to know of each, read from a
// DLPack capsule, from the buffer protocol, or from the facts that a framework states itself.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "dlpack_abi.h"
#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

// A view of an array and a reference that keeps the array alive.
struct Input {
  TensorView tensor;
  dlpack::Device device{dlpack::kCpu, 0};
  nb::object owner;
};

// Reads `array.__dlpack__()`. `stream`: what a GPU array's producer shall order its work with (as
// the protocol numbers streams; -1: with none). `dtype`: what the elements really are, where DLPack
// or the producer cannot say it and integers of the same size stand for them. `what` names the
// array in errors. Throws kInvalidArgument for a dtype or a number of dimensions that no operation
// takes, and for memory that is to be written and may not be.
Input from_dlpack(const nb::object& array, const std::string& what, std::optional<DType> dtype,
                  bool writable, std::int64_t stream);

// The same through the buffer protocol (numpy).
Input from_buffer(const nb::object& array, const std::string& what, std::optional<DType> dtype,
                  bool writable);

// The same from the facts themselves; strides in elements.
Input from_pointer(const nb::object& array, const std::string& what, DType dtype,
                   std::uintptr_t data, const nb::tuple& shape, const nb::tuple& strides,
                   std::int32_t device_type, std::int32_t device_id);

// The view of an input for an operation of `backend`. Throws kInvalidArgument where the memory is
// not that backend's.
TensorView require_backend(const Input& input, Backend backend, const char* what);

void bind_arrays(nb::module_& module);

}  // namespace tandem::python
