#include "array_exchange.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <limits>
#include <string_view>

#include "tandem/array.h"
#include "tandem/error.h"

namespace tandem::python {
namespace {

using nb::literals::operator""_a;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::optional<DType> dtype_of(std::uint8_t code, int bits) {
  switch (code) {
    case dlpack::kInt:
      if (bits == 32) return DType::kInt32;
      if (bits == 64) return DType::kInt64;
      break;
    case dlpack::kFloat:
      if (bits == 16) return DType::kFloat16;
      if (bits == 32) return DType::kFloat32;
      break;
    case dlpack::kBFloat:
      if (bits == 16) return DType::kBFloat16;
      break;
    case dlpack::kFloat8E4M3FN:
      if (bits == 8) return DType::kFloat8E4M3;
      break;
    default:
      break;
  }
  return std::nullopt;
}

std::string type_text(std::uint8_t code, int bits) {
  const char* kind = code == dlpack::kInt      ? "int"
                     : code == dlpack::kUInt   ? "uint"
                     : code == dlpack::kFloat  ? "float"
                     : code == dlpack::kBFloat ? "bfloat"
                                               : "type code ";
  std::string text = kind;
  if (code > dlpack::kBFloat || code == 3) text += std::to_string(code) + ", bits ";
  return text + std::to_string(bits);
}

// The dtype of elements of which a producer says `code` and `bits`, and the caller `given`.
DType resolve_dtype(const std::string& what, std::uint8_t code, int bits,
                    std::optional<DType> given) {
  if (given) {
    if (size_of(*given) * 8 != bits) {
      refuse(what + " has elements of " + std::to_string(bits) + " bits, " +
             std::string(name(*given)) + " has " + std::to_string(size_of(*given) * 8));
    }
    return *given;
  }
  if (const std::optional<DType> dtype = dtype_of(code, bits)) return *dtype;
  refuse(what + " is " + type_text(code, bits) +
         ", which no operation takes: bf16, fp16, fp32, fp8 (e4m3fn), int32 or int64");
}

void require_dims(const std::string& what, std::int64_t num_dims) {
  if (num_dims < 1 || num_dims > kMaxDims) {
    refuse(what + " has " + std::to_string(num_dims) + " dimensions, must have 1 to " +
           std::to_string(kMaxDims));
  }
}

TensorView read_tensor(const dlpack::Tensor& source, const std::string& what,
                       std::optional<DType> given) {
  require_dims(what, source.num_dims);
  if (source.dtype.lanes != 1) refuse(what + " has vector elements");
  TensorView view;
  view.dtype = resolve_dtype(what, source.dtype.code, source.dtype.bits, given);
  view.data = static_cast<std::byte*>(source.data) + source.byte_offset;
  view.num_dims = source.num_dims;
  std::int64_t dense = 1;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    view.shape[dim] = source.shape[dim];
    view.strides[dim] = source.strides != nullptr ? source.strides[dim] : dense;
    dense *= view.shape[dim];
  }
  return view;
}

// A capsule from the array's producer. Older producers know neither max_version nor, on the CPU, a
// stream.
nb::object request_capsule(const nb::object& array, std::int64_t stream) {
  const nb::object exporter = array.attr("__dlpack__");
  const nb::tuple version = nb::make_tuple(dlpack::kMajor, dlpack::kMinor);
  const auto device = nb::cast<nb::tuple>(array.attr("__dlpack_device__")());
  const bool on_cpu = nb::cast<int>(device[0]) == dlpack::kCpu;
  nb::object wanted_stream = on_cpu ? nb::object(nb::none()) : nb::object(nb::int_(stream));
  try {
    return exporter("stream"_a = wanted_stream, "max_version"_a = version);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return exporter("stream"_a = wanted_stream);
}

struct ReleaseBuffer {
  Py_buffer* buffer;
  ~ReleaseBuffer() { PyBuffer_Release(buffer); }
};

// Type code and bits of a buffer's elements. Formats are those of Python's struct module.
std::pair<std::uint8_t, int> buffer_type(const Py_buffer& buffer, const std::string& what) {
  std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) {
    format.remove_prefix(1);
  }
  const int bits = static_cast<int>(buffer.itemsize) * 8;
  if (format.size() == 1) {
    if (std::strchr("bhilq", format[0]) != nullptr) return {dlpack::kInt, bits};
    if (std::strchr("BHILQ", format[0]) != nullptr) return {dlpack::kUInt, bits};
    if (std::strchr("efd", format[0]) != nullptr) return {dlpack::kFloat, bits};
  }
  refuse(what + " has elements of format '" + std::string(format) +
         "', which no operation takes: bf16, fp16, fp32, fp8 (e4m3fn), int32 or int64");
}

}  // namespace

Input from_dlpack(const nb::object& array, const std::string& what, std::optional<DType> dtype,
                  bool writable, std::int64_t stream) {
  // The capsule is only looked into: its producer keeps it, and frees it when it goes.
  const nb::object capsule = request_capsule(array, stream);
  const dlpack::Tensor* tensor = nullptr;
  bool read_only = false;
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedName)) {
    const auto* managed = static_cast<const dlpack::VersionedTensor*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kVersionedName));
    if (managed->major != dlpack::kMajor) {
      refuse(what + " came as DLPack " + std::to_string(managed->major) + ", 1 is understood");
    }
    read_only = (managed->flags & dlpack::kReadOnly) != 0;
    tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), dlpack::kName)) {
    tensor = &static_cast<const dlpack::ManagedTensor*>(
                  PyCapsule_GetPointer(capsule.ptr(), dlpack::kName))
                  ->tensor;
  } else {
    refuse(what + ": __dlpack__ gave no DLPack capsule");
  }
  if (writable && read_only) refuse(what + " is read-only, and would be written to");
  Input input;
  input.tensor = read_tensor(*tensor, what, dtype);
  input.device = tensor->device;
  input.owner = array;
  return input;
}

Input from_buffer(const nb::object& array, const std::string& what, std::optional<DType> dtype,
                  bool writable) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) nb::raise_python_error();
  const ReleaseBuffer release{&buffer};
  if (writable && buffer.readonly != 0) refuse(what + " is read-only, and would be written to");
  require_dims(what, buffer.ndim);
  const auto [code, bits] = buffer_type(buffer, what);
  Input input;
  TensorView& view = input.tensor;
  view.dtype = resolve_dtype(what, code, bits, dtype);
  view.data = buffer.buf;
  view.num_dims = buffer.ndim;
  for (int dim = 0; dim < buffer.ndim; ++dim) {
    view.shape[dim] = buffer.shape[dim];
    if (buffer.strides[dim] % buffer.itemsize != 0) {
      refuse(what + " has a stride of " + std::to_string(buffer.strides[dim]) +
             " bytes, must be a multiple of its elements' " + std::to_string(buffer.itemsize));
    }
    view.strides[dim] = buffer.strides[dim] / buffer.itemsize;
  }
  input.owner = array;
  return input;
}

Input from_pointer(const nb::object& array, const std::string& what, DType dtype,
                   std::uintptr_t data, const nb::tuple& shape, const nb::tuple& strides,
                   std::int32_t device_type, std::int32_t device_id) {
  require_dims(what, static_cast<std::int64_t>(shape.size()));
  Input input;
  input.tensor.dtype = dtype;
  input.tensor.data = reinterpret_cast<void*>(data);  // NOLINT: an address is what was given
  input.tensor.num_dims = static_cast<int>(shape.size());
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    input.tensor.shape[dim] = nb::cast<std::int64_t>(shape[dim]);
    input.tensor.strides[dim] = nb::cast<std::int64_t>(strides[dim]);
  }
  input.device = {device_type, device_id};
  input.owner = array;
  return input;
}

TensorView require_backend(const Input& input, Backend backend, const char* what) {
  const bool on_gpu =
      input.device.type == dlpack::kCuda || input.device.type == dlpack::kCudaManaged;
  const bool on_cpu = input.device.type == dlpack::kCpu || input.device.type == dlpack::kCudaHost;
  if (backend == Backend::kCuda ? on_gpu : on_cpu) return input.tensor;
  refuse(std::string(what) + " is in " +
         (on_gpu   ? "GPU"
          : on_cpu ? "CPU"
                   : "another device's") +
         " memory, and the buffer's backend is " + std::string(name(backend)));
}

void bind_arrays(nb::module_& module) {
  nb::class_<Input>(module, "Input", "An array on its way into an operation.")
      .def_prop_ro(
          "dtype", [](const Input& input) { return input.tensor.dtype; }, "Type of the elements.")
      .def_prop_ro(
          "device",
          [](const Input& input) { return nb::make_tuple(input.device.type, input.device.id); },
          "DLPack's (device type, device id).");
  module.def("from_dlpack", &from_dlpack, "array"_a, "what"_a, "dtype"_a.none() = nb::none(),
             "writable"_a = false, "stream"_a = -1, "Reads an array through DLPack.");
  module.def("from_buffer", &from_buffer, "array"_a, "what"_a, "dtype"_a.none() = nb::none(),
             "writable"_a = false, "Reads an array through the buffer protocol.");
  module.def("from_pointer", &from_pointer, "array"_a, "what"_a, "dtype"_a, "data"_a, "shape"_a,
             "strides"_a, "device_type"_a, "device_id"_a,
             "Describes an array whose facts are known; strides in elements.");
  module.def(
      "copy_from_gpu",
      [](const Input& destination, const Input& source) {
        copy(destination.tensor, source.tensor, Backend::kCuda);
      },
      "destination"_a, "source"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Copies from a GPU array to one of its dtype and shape anywhere, and waits for it.");
}

}  // namespace tandem::python
