// Memory of a buffer on its way out: a typed view that any framework can take without a copy, and
// that keeps the buffer alive for as long as it, or whatever was made from it, lives.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "dlpack_abi.h"
#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

class View {
 public:
  View(const TensorView& tensor, dlpack::Device device, std::shared_ptr<const void> owner)
      : tensor_(tensor), device_(device), owner_(std::move(owner)) {}

  [[nodiscard]] const TensorView& tensor() const { return tensor_; }
  [[nodiscard]] dlpack::Device device() const { return device_; }

  // The same memory as unsigned integers of the elements' size, for frameworks that know the
  // elements' type and cannot take it through an interface.
  [[nodiscard]] View bits() const;

  // A DLPack capsule. `max_version` as the consumer gives it: (major, minor) or None.
  [[nodiscard]] nb::object to_dlpack(const nb::object& max_version) const;

  // numpy's and Numba's array interfaces; bf16 and fp8, which have no name there, as bits.
  [[nodiscard]] nb::dict array_interface(bool cuda) const;

 private:
  [[nodiscard]] dlpack::DataType dlpack_type() const;

  TensorView tensor_;
  dlpack::Device device_;
  std::shared_ptr<const void> owner_;
  bool bits_ = false;
};

void bind_view(nb::module_& module);

}  // namespace tandem::python
