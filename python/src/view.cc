#include "view.h"

#include <nanobind/stl/string.h>

#include <array>
#include <string>

namespace tandem::python {
namespace {

using nb::literals::operator""_a;

// What a capsule's tensor points to.
template <typename Managed>
struct Export {
  Managed managed{};
  std::array<std::int64_t, kMaxDims> shape{};
  std::array<std::int64_t, kMaxDims> strides{};
  std::shared_ptr<const void> owner;
};

// A capsule that nobody consumed still owns its tensor. May run without the interpreter's lock only
// through the tensor's own deleter, which touches nothing of Python.
template <typename Managed>
void destroy_capsule(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

template <typename Managed>
Managed* make_managed(const TensorView& tensor, dlpack::Device device, dlpack::DataType dtype,
                      const std::shared_ptr<const void>& owner) {
  auto* result = new Export<Managed>;
  result->shape = tensor.shape;
  result->strides = tensor.strides;
  result->owner = owner;
  result->managed.manager = result;
  result->managed.deleter = [](Managed* self) {
    delete static_cast<Export<Managed>*>(self->manager);
  };
  result->managed.tensor = {.data = tensor.data,
                            .device = device,
                            .num_dims = tensor.num_dims,
                            .dtype = dtype,
                            .shape = result->shape.data(),
                            .strides = result->strides.data(),
                            .byte_offset = 0};
  return &result->managed;
}

nb::tuple to_tuple(const std::array<std::int64_t, kMaxDims>& extents, int num_dims, int factor) {
  switch (num_dims) {
    case 1:
      return nb::make_tuple(extents[0] * factor);
    case 2:
      return nb::make_tuple(extents[0] * factor, extents[1] * factor);
    default:
      return nb::make_tuple(extents[0] * factor, extents[1] * factor, extents[2] * factor);
  }
}

}  // namespace

View View::bits() const {
  View result = *this;
  result.bits_ = true;
  return result;
}

dlpack::DataType View::dlpack_type() const {
  const auto bits = static_cast<std::uint8_t>(size_of(tensor_.dtype) * 8);
  if (bits_) return {dlpack::kUInt, bits, 1};
  switch (tensor_.dtype) {
    case DType::kBFloat16:
      return {dlpack::kBFloat, bits, 1};
    case DType::kFloat16:
    case DType::kFloat32:
      return {dlpack::kFloat, bits, 1};
    case DType::kFloat8E4M3:
      return {dlpack::kFloat8E4M3FN, bits, 1};
    case DType::kInt32:
    case DType::kInt64:
      break;
  }
  return {dlpack::kInt, bits, 1};
}

nb::object View::to_dlpack(const nb::object& max_version) const {
  const bool versioned =
      !max_version.is_none() &&
      nb::cast<std::uint32_t>(nb::cast<nb::tuple>(max_version)[0]) >= dlpack::kMajor;
  if (versioned) {
    auto* managed = make_managed<dlpack::VersionedTensor>(tensor_, device_, dlpack_type(), owner_);
    managed->major = dlpack::kMajor;
    managed->minor = dlpack::kMinor;
    return nb::steal(PyCapsule_New(managed, dlpack::kVersionedName, [](PyObject* capsule) {
      destroy_capsule<dlpack::VersionedTensor>(capsule, dlpack::kVersionedName);
    }));
  }
  auto* managed = make_managed<dlpack::ManagedTensor>(tensor_, device_, dlpack_type(), owner_);
  return nb::steal(PyCapsule_New(managed, dlpack::kName, [](PyObject* capsule) {
    destroy_capsule<dlpack::ManagedTensor>(capsule, dlpack::kName);
  }));
}

nb::dict View::array_interface(bool cuda) const {
  const int size = size_of(tensor_.dtype);
  const bool plain =
      !bits_ && tensor_.dtype != DType::kBFloat16 && tensor_.dtype != DType::kFloat8E4M3;
  const bool integer = tensor_.dtype == DType::kInt32 || tensor_.dtype == DType::kInt64;
  const std::string type = (size == 1 ? "|" : "<") +
                           std::string(!plain    ? "u"
                                       : integer ? "i"
                                                 : "f") +
                           std::to_string(size);
  nb::dict result;
  result["shape"] = to_tuple(tensor_.shape, tensor_.num_dims, 1);
  result["strides"] = to_tuple(tensor_.strides, tensor_.num_dims, size);
  result["typestr"] = type;
  result["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(tensor_.data), false);
  result["version"] = 3;
  if (cuda) result["stream"] = nb::none();  // work is ordered by the caller's stream already
  return result;
}

void bind_view(nb::module_& module) {
  const auto require_device = [](const View& view, dlpack::DeviceType type, const char* attribute) {
    if (view.device().type != type) throw nb::attribute_error(attribute);
  };
  nb::class_<View>(module, "View",
                   "Memory of a buffer, for any framework to take without a copy (numpy.asarray,\n"
                   "torch.from_dlpack, ...). Keeps the buffer alive.")
      .def_prop_ro(
          "dtype", [](const View& view) { return view.tensor().dtype; }, "Type of the elements.")
      .def_prop_ro(
          "shape",
          [](const View& view) { return to_tuple(view.tensor().shape, view.tensor().num_dims, 1); },
          "Extents, in elements.")
      .def_prop_ro(
          "strides",
          [](const View& view) {
            return to_tuple(view.tensor().strides, view.tensor().num_dims, 1);
          },
          "Strides, in elements.")
      .def_prop_ro(
          "data",
          [](const View& view) { return reinterpret_cast<std::uintptr_t>(view.tensor().data); },
          "Address of the first element.")
      .def("bits", &View::bits, "The same memory as unsigned integers of the elements' size.")
      .def(
          "__dlpack__",
          [](const View& view, const nb::object& /*stream*/, const nb::object& max_version,
             const nb::object& /*dl_device*/, const nb::object& copy) {
            if (copy.is(nb::bool_(true))) {
              throw nb::buffer_error("a view gives its own memory, never a copy");
            }
            return view.to_dlpack(max_version);
          },
          nb::kw_only(), "stream"_a = nb::none(), "max_version"_a = nb::none(),
          "dl_device"_a = nb::none(), "copy"_a = nb::none(),
          "A DLPack capsule. Streams are not ordered: the work that fills the view is on the\n"
          "stream of its operation.")
      .def(
          "__dlpack_device__",
          [](const View& view) { return nb::make_tuple(view.device().type, view.device().id); },
          "DLPack's (device type, device id).")
      .def_prop_ro(
          "__array_interface__",
          [require_device](const View& view) {
            require_device(view, dlpack::kCpu, "__array_interface__");
            return view.array_interface(false);
          },
          "numpy's interface; bf16 and fp8 as unsigned integers.")
      .def_prop_ro(
          "__cuda_array_interface__",
          [require_device](const View& view) {
            require_device(view, dlpack::kCuda, "__cuda_array_interface__");
            return view.array_interface(true);
          },
          "Numba's interface; bf16 and fp8 as unsigned integers.");
}

}  // namespace tandem::python
