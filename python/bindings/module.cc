// SPDX-License-Identifier: Apache-2.0
// The Python module fovea._core.
#include "python/bindings/module.h"

#include "fovea/error.h"
#include "fovea/version.h"

namespace fovea::python {
namespace {

const char* code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::workspace_too_small:
      return "workspace_too_small";
    case ErrorCode::corrupt_file:
      return "corrupt_file";
    case ErrorCode::io:
      return "io";
    case ErrorCode::device_failure:
      return "device_failure";
  }
  return "unknown";
}

// Raises the Python class that `type` points to.
void translate(const std::exception_ptr& exception, void* type) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    const nb::handle error_class(static_cast<PyObject*>(type));
    // Messages may quote bytes of files, which need not be UTF-8.
    const nb::object message = nb::steal(PyUnicode_DecodeUTF8(
        error.what(), static_cast<Py_ssize_t>(std::char_traits<char>::length(error.what())),
        "replace"));
    const nb::object raised = error_class(message, code_name(error.code()));
    PyErr_SetObject(error_class.ptr(), raised.ptr());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "The compiled part of Fovea. Import fovea instead.";
  // Modules that torch keeps until the end of the process keep objects of this one.
  nb::set_leak_warnings(false);
  nb::object error = nb::module_::import_("fovea._error").attr("Error");
  module.attr("Error") = error;
  nb::register_exception_translator(translate, error.release().ptr());
  module.attr("__version__") = FOVEA_VERSION;
  bind_enums(module);
  bind_specs(module);
  bind_devices(module);
  bind_layer_arrays(module);
  bind_pools(module);
  bind_tables(module);
  bind_selection(module);
  bind_batches(module);
  bind_tensors(module);
  bind_backends(module);
  bind_merger(module);
  bind_prefix_caches(module);
  bind_engine(module);
  bind_commands(module);
}

}  // namespace fovea::python
