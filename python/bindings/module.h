// SPDX-License-Identifier: Apache-2.0
// The parts of the module fovea._core. Each adds its types and functions.
#pragma once

#include <nanobind/nanobind.h>

namespace fovea::python {

namespace nb = nanobind;

void bind_enums(nb::module_& module);
void bind_specs(nb::module_& module);
void bind_devices(nb::module_& module);
void bind_layer_arrays(nb::module_& module);
void bind_pools(nb::module_& module);
void bind_tables(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_batches(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_backends(nb::module_& module);
void bind_merger(nb::module_& module);
void bind_prefix_caches(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_commands(nb::module_& module);

}  // namespace fovea::python
