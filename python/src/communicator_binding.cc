// Communicator and run_threads for Python. Whatever waits for other ranks waits without the
// interpreter's lock: the others may be threads of this very process.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "bindings.h"
#include "tandem/communicator.h"

namespace tandem::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;
using Bytes = std::vector<std::byte>;

CommunicatorOptions options(double timeout) {
  if (!(timeout > 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                "timeout is " + std::to_string(timeout) + " s, must be positive");
  }
  // As long as clocks can count is for ever.
  const double milliseconds = std::min(std::ceil(timeout * 1e3), 1e12);
  return {.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(milliseconds))};
}

std::span<const std::byte> to_span(const nb::bytes& message) {
  return std::as_bytes(std::span(message.c_str(), message.size()));
}

nb::bytes to_bytes(std::span<const std::byte> message) {
  return nb::bytes(message.data(), message.size());
}

// Asks the caller's function, on whichever thread the library calls from.
Communicator from_all_gather(int rank, int size, const nb::callable& all_gather, double timeout) {
  const auto gather = [&all_gather](std::span<const std::byte> message) {
    const nb::gil_scoped_acquire locked;
    std::vector<Bytes> result;
    for (const nb::handle item : all_gather(to_bytes(message))) {
      const std::span<const std::byte> bytes = to_span(nb::cast<nb::bytes>(item));
      result.emplace_back(bytes.begin(), bytes.end());
    }
    return result;
  };
  const nb::gil_scoped_release unlocked;
  return Communicator::from_all_gather(rank, size, gather, options(timeout));
}

nb::list all_gather(const Communicator& communicator, const nb::bytes& message) {
  std::vector<Bytes> messages;
  {
    const nb::gil_scoped_release unlocked;
    messages = communicator.all_gather(to_span(message));
  }
  nb::list result;
  for (const Bytes& item : messages) result.append(to_bytes(item));
  return result;
}

// `body` has kept what it raised; here it only matters that the rank is gone.
void run_rank(const nb::callable& body, const Communicator& communicator) {
  const nb::gil_scoped_acquire locked;
  try {
    body(communicator);
  } catch (const nb::python_error& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace

void bind_communicator(nb::module_& module) {
  constexpr double kTimeout = 30;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Communicator>(module, "Communicator", "Which rank, of how many; see tandem_ep.")
      .def_static(
          "from_environment",
          [](double timeout) { return Communicator::from_environment(options(timeout)); },
          "timeout"_a = kTimeout, Unlocked())
      .def_static(
          "connect",
          [](const std::string& name, int rank, int size, double timeout) {
            return Communicator::connect(name, rank, size, options(timeout));
          },
          "name"_a, "rank"_a, "size"_a, "timeout"_a = kTimeout, Unlocked())
      .def_static("from_all_gather", &from_all_gather, "rank"_a, "size"_a, "all_gather"_a,
                  "timeout"_a = kTimeout)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def("all_gather", &all_gather, "message"_a)
      .def("barrier", &Communicator::barrier, Unlocked());
  module.def(
      "run_threads",
      [](int num_ranks, const nb::callable& body, double timeout) {
        const nb::gil_scoped_release unlocked;
        run_threads(
            num_ranks, [&body](const Communicator& rank) { run_rank(body, rank); },
            options(timeout));
      },
      "num_ranks"_a, "body"_a, "timeout"_a = kTimeout);
}

}  // namespace tandem::python
