// The parts of the module tandem_ep._tandem, one function each.
#pragma once

#include <nanobind/nanobind.h>

#include "tandem/error.h"

namespace tandem::python {

// The tandem_ep.Error with the fields of this one.
nanobind::object to_python(const Error& error);

void bind_communicator(nanobind::module_& module);
void bind_buffer(nanobind::module_& module);

}  // namespace tandem::python
