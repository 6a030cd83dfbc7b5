// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/layer_array.h"

#include <nanobind/stl/string.h>

#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

// An exported tensor owns this.
struct Export {
  LayerArray array;
  DlManagedTensor plain = {};
  DlManagedTensorVersioned versioned = {};
};

void delete_export(Export* exported) {
  const PyGILState_STATE state = PyGILState_Ensure();
  delete exported;
  PyGILState_Release(state);
}

DlTensor tensor_of(LayerArray& array) {
  return {.data = array.data,
          .device = array.device,
          .dimensions = static_cast<int32_t>(array.shape.size()),
          .dtype = array.dtype,
          .shape = array.shape.data(),
          .strides = array.strides.data(),
          .byte_offset = 0};
}

// Runs if nobody took the tensor out of the capsule.
void delete_plain(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* tensor = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  tensor->deleter(tensor);
}

void delete_versioned(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") == 0) return;
  auto* tensor =
      static_cast<DlManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  tensor->deleter(tensor);
}

nb::object export_plain(const LayerArray& array) {
  auto* exported = new Export{.array = array};
  exported->plain = {tensor_of(exported->array), exported, [](DlManagedTensor* tensor) {
                       delete_export(static_cast<Export*>(tensor->context));
                     }};
  return nb::steal(PyCapsule_New(&exported->plain, "dltensor", delete_plain));
}

nb::object export_versioned(const LayerArray& array) {
  auto* exported = new Export{.array = array};
  exported->versioned = {.version = {1, 0},
                         .context = exported,
                         .deleter =
                             [](DlManagedTensorVersioned* tensor) {
                               delete_export(static_cast<Export*>(tensor->context));
                             },
                         .flags = 0,
                         .tensor = tensor_of(exported->array)};
  return nb::steal(PyCapsule_New(&exported->versioned, "dltensor_versioned", delete_versioned));
}

nb::object export_array(const LayerArray& array, const nb::kwargs& arguments) {
  const auto given = [&](const char* name) {
    return arguments.contains(name) ? nb::object(arguments[name]) : nb::none();
  };
  if (given("copy").ptr() == Py_True) throw nb::buffer_error("the memory cannot be copied here");
  const nb::object device = given("dl_device");
  if (!device.is_none() && !device.equal(nb::make_tuple(array.device.kind, array.device.index))) {
    throw nb::buffer_error("the memory cannot be copied to another device here");
  }
  const nb::object version = given("max_version");
  const bool versioned = !version.is_none() && nb::cast<int64_t>(nb::object(version[0])) >= 1;
  return versioned ? export_versioned(array) : export_plain(array);
}

nb::tuple tuple_of(const std::vector<int64_t>& values) {
  nb::list list;
  for (const int64_t value : values) list.append(value);
  return nb::tuple(list);
}

LayerArray bits_of(LayerArray array) {
  array.dtype.code = kDlUint;
  return array;
}

}  // namespace

LayerArray dense_array(nb::handle owner, const void* data, DType dtype,
                       std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t dense = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = dense;
    dense *= shape[axis];
  }
  return {nb::borrow(owner), const_cast<void*>(data), dl_type(dtype),
          dl_device({}),     std::move(shape),        std::move(strides)};
}

void bind_layer_arrays(nb::module_& module) {
  nb::class_<LayerArray>(module, "LayerArray",
                         "An array over memory of Fovea, for numpy.from_dlpack, torch.from_dlpack "
                         "and the like. It keeps the owner of the memory.",
                         nb::is_final())
      .def_prop_ro("shape", [](const LayerArray& self) { return tuple_of(self.shape); })
      .def_prop_ro(
          "strides", [](const LayerArray& self) { return tuple_of(self.strides); },
          "Elements between neighbours, per axis.")
      .def_prop_ro(
          "dtype", [](const LayerArray& self) { return dtype_text(self.dtype); },
          "\"fp32\", \"bf16\", \"int32\", ...")
      .def_prop_ro("device", [](const LayerArray& self) { return device_of(self.device); })
      .def_prop_ro("address",
                   [](const LayerArray& self) { return reinterpret_cast<uintptr_t>(self.data); })
      .def_prop_ro(
          "bits", [](const LayerArray& self) { return bits_of(self); },
          "The same memory as unsigned integers, for libraries without bf16 or fp8.")
      .def("__dlpack__", &export_array,
           nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, "
                   "int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | "
                   "None = None) -> typing.Any"))
      .def("__dlpack_device__", [](const LayerArray& self) {
        return nb::make_tuple(self.device.kind, self.device.index);
      });
}

}  // namespace fovea::python
