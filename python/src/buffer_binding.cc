// Buffer for Python: arrays come as Input, memory of the buffer goes out as View. A View owns a
// share of the buffer; so the buffer lives until the last array made from it is gone.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include "array_exchange.h"
#include "bindings.h"
#include "tandem/buffer.h"
#include "view.h"

namespace tandem::python {
namespace {

using nb::literals::operator""_a;

double to_seconds(std::chrono::nanoseconds duration) {
  return duration == BufferOptions::kForever ? std::numeric_limits<double>::infinity()
                                             : std::chrono::duration<double>(duration).count();
}

std::chrono::nanoseconds from_seconds(double seconds) {
  if (std::isnan(seconds)) throw Error(ErrorCode::kInvalidArgument, "timeout is not a number");
  if (seconds > 9e9) return BufferOptions::kForever;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::max(seconds, -1.0) * 1e9));
}

// What one dispatch gave; outlives a destroyed buffer as its views do.
struct Dispatched {
  DispatchResult result;
  dlpack::Device device;
  std::shared_ptr<const Buffer> owner;

  [[nodiscard]] std::optional<View> view(const TensorView& tensor) const {
    if (!tensor.has_value()) return std::nullopt;
    return View(tensor, device, owner);
  }
};

class PyBuffer {
 public:
  PyBuffer(const Communicator& communicator, const BufferOptions& options) {
    const nb::gil_scoped_release unlocked;
    buffer_ = std::make_shared<Buffer>(communicator, options);
  }

  static PyBuffer join(int rank, const BufferOptions& options) {
    const nb::gil_scoped_release unlocked;
    return PyBuffer(std::make_shared<Buffer>(Buffer::join(rank, options)));
  }

  static PyBuffer join_across_hosts(const std::string& address, const std::string& secret, int rank,
                                    const BufferOptions& options) {
    const nb::gil_scoped_release unlocked;
    return PyBuffer(
        std::make_shared<Buffer>(Buffer::join_across_hosts(address, secret, rank, options)));
  }

  [[nodiscard]] const std::shared_ptr<Buffer>& get() const {
    if (!buffer_) throw Error(ErrorCode::kInvalidArgument, "the buffer was destroyed");
    return buffer_;
  }

  void destroy() {
    const nb::gil_scoped_release unlocked;
    buffer_.reset();
  }
  [[nodiscard]] bool is_destroyed() const { return buffer_ == nullptr; }

  Dispatched dispatch(const Input& x, const Input& topk_idx, DispatchOptions options,
                      const Input* topk_weights, const Input* recv_x, const Input* recv_scales,
                      std::uintptr_t stream) {
    const std::shared_ptr<Buffer> buffer = get();
    const Backend backend = buffer->options().backend;
    const ConstTensorView x_view = require_backend(x, backend, "x");
    const ConstTensorView idx_view = require_backend(topk_idx, backend, "topk_idx");
    if (topk_weights != nullptr) {
      options.topk_weights = require_backend(*topk_weights, backend, "topk_weights");
    }
    if (recv_x != nullptr) options.recv_x = require_backend(*recv_x, backend, "recv_x");
    if (recv_scales != nullptr) {
      options.recv_scales = require_backend(*recv_scales, backend, "recv_scales");
    }
    options.stream = reinterpret_cast<void*>(stream);  // NOLINT: a handle given as a number
    const nb::gil_scoped_release unlocked;
    return {buffer->dispatch(x_view, idx_view, options), x.device, buffer};
  }

  View next_combine_buffer(const Dispatched& dispatched, DType dtype) {
    const std::shared_ptr<Buffer> buffer = get();
    const nb::gil_scoped_release unlocked;
    return {buffer->next_combine_buffer(dispatched.result.handle, dtype), dispatched.device,
            buffer};
  }

  Hook combine(const Input& y, const Input* topk_weights, const Dispatched& dispatched,
               const Input& out, bool return_hook, std::uintptr_t stream, int num_sms) {
    const std::shared_ptr<Buffer> buffer = get();
    const Backend backend = buffer->options().backend;
    const ConstTensorView y_view = require_backend(y, backend, "y");
    ConstTensorView weights_view;
    if (topk_weights != nullptr) {
      weights_view = require_backend(*topk_weights, backend, "topk_weights");
    }
    const TensorView out_view = require_backend(out, backend, "out");
    const CombineOptions options{.return_hook = return_hook,
                                 .stream = reinterpret_cast<void*>(stream),  // NOLINT: as above
                                 .num_sms = num_sms};
    const nb::gil_scoped_release unlocked;
    return buffer->combine(y_view, weights_view, dispatched.result.handle, out_view, options);
  }

  // One of Buffer's functions that need no arrays, while other threads may run.
  template <auto kFunction, typename... Arguments>
  auto call(Arguments... arguments) const {
    const std::shared_ptr<Buffer> buffer = get();
    const nb::gil_scoped_release unlocked;
    return (buffer.get()->*kFunction)(arguments...);
  }

 private:
  explicit PyBuffer(std::shared_ptr<Buffer> buffer) : buffer_(std::move(buffer)) {}

  std::shared_ptr<Buffer> buffer_;
};

void bind_options(nb::module_& module) {
  nb::class_<BufferOptions>(module, "BufferOptions", "See tandem_ep.Buffer.")
      .def(nb::init<>())
      .def_rw("backend", &BufferOptions::backend)
      .def_rw("num_experts", &BufferOptions::num_experts)
      .def_rw("max_tokens", &BufferOptions::max_tokens)
      .def_rw("max_hidden", &BufferOptions::max_hidden)
      .def_rw("max_topk", &BufferOptions::max_topk)
      .def_rw("widest_format", &BufferOptions::widest_format)
      .def_rw("expert_owners", &BufferOptions::expert_owners)
      .def_rw("packed_placement", &BufferOptions::packed_placement)
      .def_rw("slotted_placement", &BufferOptions::slotted_placement)
      .def_rw("combine", &BufferOptions::combine)
      .def_rw("padded_layout", &BufferOptions::padded_layout)
      .def_rw("capacity_rows", &BufferOptions::capacity_rows)
      .def_prop_rw(
          "timeout", [](const BufferOptions& self) { return to_seconds(self.timeout); },
          [](BufferOptions& self, double seconds) { self.timeout = from_seconds(seconds); })
      .def_rw("on_timeout", &BufferOptions::on_timeout)
      .def_rw("door", &BufferOptions::door)
      .def_rw("door_address", &BufferOptions::door_address)
      .def_rw("max_ranks", &BufferOptions::max_ranks)
      .def_rw("num_threads", &BufferOptions::num_threads)
      .def_rw("device", &BufferOptions::device)
      .def_rw("num_sms", &BufferOptions::num_sms)
      .def_rw("first_epoch", &BufferOptions::first_epoch);
  nb::class_<DispatchOptions>(module, "DispatchOptions", "See tandem_ep.Buffer.dispatch.")
      .def(nb::init<>())
      .def_rw("format", &DispatchOptions::format)
      .def_rw("placement", &DispatchOptions::placement)
      .def_rw("layout", &DispatchOptions::layout)
      .def_rw("row_alignment", &DispatchOptions::row_alignment)
      .def_rw("max_tokens", &DispatchOptions::max_tokens)
      .def_rw("return_hook", &DispatchOptions::return_hook)
      .def_rw("num_sms", &DispatchOptions::num_sms);
}

template <TensorView DispatchResult::*kMember>
std::optional<View> member_view(const Dispatched& self) {
  return self.view(self.result.*kMember);
}

void bind_results(nb::module_& module) {
  nb::class_<Hook>(module, "Hook", "Runs an operation's receive phase, once.")
      .def("__call__", &Hook::operator(), nb::call_guard<nb::gil_scoped_release>())
      .def("__bool__", [](const Hook& self) { return static_cast<bool>(self); });
  nb::class_<Dispatched>(module, "Dispatched", "What a dispatch gave; see tandem_ep.")
      .def_prop_ro("x", &member_view<&DispatchResult::x>)
      .def_prop_ro("scales", &member_view<&DispatchResult::scales>)
      .def_prop_ro("counts", &member_view<&DispatchResult::counts>)
      .def_prop_ro("offsets", &member_view<&DispatchResult::offsets>)
      .def_prop_ro("ranges", &member_view<&DispatchResult::ranges>)
      .def_prop_ro("source_tokens", &member_view<&DispatchResult::source_tokens>)
      .def_prop_ro("hook", [](const Dispatched& self) { return self.result.hook; })
      .def("active", [](const Dispatched& self) { return self.result.handle.active(); });
}

}  // namespace

void bind_buffer(nb::module_& module) {
  bind_options(module);
  bind_results(module);
  nb::class_<PyBuffer>(module, "Buffer", "See tandem_ep.Buffer.")
      .def(nb::init<const Communicator&, const BufferOptions&>(), "communicator"_a, "options"_a)
      .def_static("size_bytes", &Buffer::size_bytes, "options"_a, "num_ranks"_a)
      .def("destroy", &PyBuffer::destroy)
      .def_prop_ro("is_destroyed", &PyBuffer::is_destroyed)
      .def_prop_ro("options", [](const PyBuffer& self) { return self.get()->options(); })
      .def_prop_ro("rank", [](const PyBuffer& self) { return self.get()->rank(); })
      .def_prop_ro("num_ranks", [](const PyBuffer& self) { return self.get()->num_ranks(); })
      .def_prop_ro("local_experts",
                   [](const PyBuffer& self) { return self.get()->local_experts(); })
      .def_prop_ro("capacity_rows",
                   [](const PyBuffer& self) { return self.get()->capacity_rows(); })
      .def("dispatch", &PyBuffer::dispatch, "x"_a, "topk_idx"_a, "options"_a,
           "topk_weights"_a.none() = nb::none(), "recv_x"_a.none() = nb::none(),
           "recv_scales"_a.none() = nb::none(), "stream"_a = 0)
      .def("next_combine_buffer", &PyBuffer::next_combine_buffer, "dispatched"_a, "dtype"_a)
      .def("combine", &PyBuffer::combine, "y"_a, "topk_weights"_a.none(), "dispatched"_a, "out"_a,
           "return_hook"_a = false, "stream"_a = 0, "num_sms"_a = 0)
      .def("check", &PyBuffer::call<&Buffer::check>)
      .def_static("join", &PyBuffer::join, "rank"_a, "options"_a)
      .def_static("join_across_hosts", &PyBuffer::join_across_hosts, "address"_a, "secret"_a,
                  "rank"_a, "options"_a)
      .def("mask", &PyBuffer::call<&Buffer::mask, int>, "rank"_a)
      .def("unmask", &PyBuffer::call<&Buffer::unmask, int>, "rank"_a)
      .def("recover", &PyBuffer::call<&Buffer::recover>)
      .def("active", &PyBuffer::call<&Buffer::active>)
      .def("waiting", &PyBuffer::call<&Buffer::waiting>)
      .def(
          "last_loss",
          [](const PyBuffer& self) {
            const std::optional<Error> loss = self.call<&Buffer::last_loss>();
            return loss ? to_python(*loss) : nb::none();
          },
          nb::sig("def last_loss(self) -> object | None"));
}

}  // namespace tandem::python
