// The module tandem_ep._tandem: the library's vocabulary, errors and facts about the build. The
// package tandem_ep (Python) is what users see; this is what it stands on.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>

#include "array_exchange.h"
#include "tandem/error.h"
#include "tandem/info.h"
#include "tandem/types.h"
#include "view.h"

namespace tandem::python {
namespace {

using nb::literals::operator""_a;

std::string text(std::string_view view) { return std::string(view); }

double seconds(std::chrono::nanoseconds duration) {
  return duration == std::chrono::nanoseconds::max()
             ? std::numeric_limits<double>::infinity()
             : std::chrono::duration<double>(duration).count();
}

}  // namespace

nb::object to_python(const Error& error) {
  const ErrorInfo& info = error.info();
  const std::string where =
      std::string(error.where().file_name()) + ":" + std::to_string(error.where().line());
  const nb::object type = nb::module_::import_("tandem_ep._error").attr("Error");
  return type(error.what(), "code"_a = info.code, "operation"_a = text(name(info.operation)),
              "epoch"_a = info.epoch, "phase"_a = text(name(info.phase)), "peer"_a = info.peer,
              "expected"_a = info.expected, "seen"_a = info.seen, "waited"_a = seconds(info.waited),
              "limit"_a = seconds(info.limit), "where"_a = where);
}

namespace {

void bind_errors(nb::module_& module) {
  nb::enum_<ErrorCode>(module, "ErrorCode", "What kind of error a tandem_ep.Error is.")
      .value("INVALID_ARGUMENT", ErrorCode::kInvalidArgument,
             "An argument is wrong; nothing was sent.")
      .value("CAPACITY", ErrorCode::kCapacity,
             "The rows of this operation do not fit; every rank gets the same error.")
      .value("ORDER", ErrorCode::kOrder,
             "The call would wait for itself (a hook not run, both halves reserved).")
      .value("STALE_HANDLE", ErrorCode::kStaleHandle,
             "The handle's half was used again by a later dispatch.")
      .value("TIMEOUT", ErrorCode::kTimeout,
             "A wait reached the buffer's timeout; `peer` is who was missing.")
      .value("MISMATCH", ErrorCode::kMismatch,
             "A peer calls another operation or with other arguments.")
      .value("UNREACHABLE", ErrorCode::kUnreachable,
             "Peers cannot load from and store to each other's memory.")
      .value("UNSUPPORTED", ErrorCode::kUnsupported,
             "Not available here (backend not built, no device).")
      .value("RESOURCE", ErrorCode::kResource,
             "The system refused memory, a descriptor, a thread or a process.")
      .value("PEER_LOST", ErrorCode::kPeerLost,
             "A peer has ended or destroyed its end: during set-up, or while waited for.")
      .value("FAILED_BUFFER", ErrorCode::kFailedBuffer,
             "An earlier operation on this buffer failed; the message repeats its error.")
      .value("MASKED", ErrorCode::kMasked,
             "This rank has been masked by its peers; recover() lets it back.");
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      const nb::object instance = to_python(error);
      PyErr_SetObject(instance.type().ptr(), instance.ptr());
    }
  });
}

// Every enumerator under the name that the command line and JSON give it.
template <typename Enum>
nb::dict by_name(std::initializer_list<Enum> values) {
  nb::dict result;
  for (const Enum value : values) result[nb::str(text(name(value)).c_str())] = nb::cast(value);
  return result;
}

void bind_vocabulary(nb::module_& module) {
  nb::enum_<DType>(module, "DType", "Type of an array's elements.")
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16)
      .value("FLOAT32", DType::kFloat32)
      .value("FLOAT8_E4M3", DType::kFloat8E4M3)
      .value("INT32", DType::kInt32)
      .value("INT64", DType::kInt64);
  nb::enum_<Format>(module, "Format", "What a dispatched row looks like.")
      .value("BFLOAT16", Format::kBFloat16)
      .value("FLOAT16", Format::kFloat16)
      .value("FLOAT32", Format::kFloat32)
      .value("FP8", Format::kFp8)
      .value("FP8_POW2", Format::kFp8Pow2)
      .value("FP8_UE8M0", Format::kFp8Ue8m0);
  nb::enum_<Placement>(module, "Placement", "How a dispatched row finds its place.")
      .value("AUTOMATIC", Placement::kAutomatic)
      .value("PACKED", Placement::kPacked)
      .value("SLOTTED", Placement::kSlotted);
  nb::enum_<Layout>(module, "Layout", "The shape of what dispatch hands to the experts.")
      .value("PADDED", Layout::kPadded)
      .value("PACKED", Layout::kPacked);
  nb::enum_<Backend>(module, "Backend", "Where ranks live.")
      .value("CPU", Backend::kCpu)
      .value("CUDA", Backend::kCuda);
  nb::enum_<OnTimeout>(module, "OnTimeout", "What becomes of an operation that a rank misses.")
      .value("FAIL", OnTimeout::kFail, "It fails on every rank.")
      .value("MASK", OnTimeout::kMask, "The rank is masked, and the operation ends without it.");
  module.attr("DTYPES") = by_name({DType::kBFloat16, DType::kFloat16, DType::kFloat32,
                                   DType::kFloat8E4M3, DType::kInt32, DType::kInt64});
  module.attr("FORMATS") = by_name({Format::kBFloat16, Format::kFloat16, Format::kFloat32,
                                    Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0});
  module.attr("PLACEMENTS") =
      by_name({Placement::kAutomatic, Placement::kPacked, Placement::kSlotted});
  module.attr("LAYOUTS") = by_name({Layout::kPadded, Layout::kPacked});
  module.attr("BACKENDS") = by_name({Backend::kCpu, Backend::kCuda});
  module.attr("ON_TIMEOUT") = by_name({OnTimeout::kFail, OnTimeout::kMask});
  module.attr("MAX_HIDDEN") = kMaxHidden;
  module.attr("MAX_TOPK") = kMaxTopk;
  module.attr("MAX_RANKS") = kMaxRanks;
}

void bind_info(nb::module_& module) {
  nb::class_<BackendInfo>(module, "BackendInfo", "What this build can do with one backend here.")
      .def_prop_ro("name", [](const BackendInfo& info) { return text(name(info.backend)); })
      .def_ro("built", &BackendInfo::built)
      .def_ro("usable", &BackendInfo::usable)
      .def_ro("why_not", &BackendInfo::why_not, "If not usable: the reason, in a sentence.")
      .def_ro("details", &BackendInfo::details, "Devices, instruction sets, ...");
  module.def("version", &version, "Version of the library.");
  module.def("backends", &backends, "One entry per backend that the library knows, built or not.");
}

}  // namespace
}  // namespace tandem::python

NB_MODULE(_tandem, module) {
  using namespace tandem::python;
  module.doc() = "What the package tandem_ep stands on; not meant to be used directly.";
  bind_errors(module);
  bind_vocabulary(module);
  bind_info(module);
  bind_arrays(module);
  bind_view(module);
  bind_communicator(module);
  bind_buffer(module);
}
