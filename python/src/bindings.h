// The parts of the module tandem_ep._tandem, one function each.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::python {

void bind_communicator(nanobind::module_& module);
void bind_buffer(nanobind::module_& module);

}  // namespace tandem::python
