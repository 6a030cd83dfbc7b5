// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/array.h"

#include <limits>
#include <unordered_map>

#include "core/check.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

// How arrays of one Python type are read.
struct Producer {
  const DlExchangeApi* api = nullptr;  // null: by `__dlpack__`
  bool is_array = false;
  bool takes_version = true;  // `__dlpack__` knows the keyword max_version
  bool only_host = false;     // `__dlpack_device__` need not be asked
};

const DlExchangeApi* exchange_api_of(PyObject* type) {
  const nb::object capsule = nb::steal(PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"));
  if (!capsule.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) PyErr_Clear();
  const auto* header = static_cast<const DlExchangeHeader*>(pointer);
  while (header != nullptr && header->version.major != 1) header = header->previous;
  const auto* api = reinterpret_cast<const DlExchangeApi*>(header);
  return api != nullptr && api->view_of_object != nullptr ? api : nullptr;
}

Producer describe(PyObject* type) {
  Producer producer;
  producer.api = exchange_api_of(type);
  producer.is_array = producer.api != nullptr || PyObject_HasAttrString(type, "__dlpack__") != 0;
  const nb::handle handle(type);
  producer.only_host = nb::cast<std::string>(nb::str(handle.attr("__module__"))) == "numpy" &&
                       nb::cast<std::string>(nb::str(handle.attr("__name__"))) == "ndarray";
  return producer;
}

// Types live as long as the process, so the table holds references to them.
Producer& producer_of(nb::handle source) {
  static std::unordered_map<PyObject*, Producer>* table =
      new std::unordered_map<PyObject*, Producer>;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(source.ptr()));
  static PyObject* last_type = nullptr;
  static Producer* last = nullptr;
  if (type == last_type) return *last;
  auto found = table->find(type);
  if (found == table->end()) {
    found = table->emplace(type, describe(type)).first;
    Py_INCREF(type);
  }
  last_type = type;
  last = &found->second;
  return *last;
}

// Throws Error{invalid_argument} with type and text of an exception of the array's library.
[[noreturn]] void fail_by_library(const char* name, const nb::python_error& error) {
  fail(ErrorCode::invalid_argument, "{}: its library failed: {}: {}", name,
       nb::cast<std::string>(nb::str(error.type().attr("__name__"))),
       nb::cast<std::string>(nb::str(error.value())));
}

nb::object call_dlpack(nb::handle source, Producer& producer, nb::handle stream) {
  nb::object method = source.attr("__dlpack__");
  nb::dict arguments;
  if (stream.is_valid()) arguments["stream"] = stream;
  if (producer.takes_version) {
    arguments["max_version"] = nb::make_tuple(1, 3);
    try {
      return method(**arguments);
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      producer.takes_version = false;  // a library from before DLPack 1.0
      nb::del(arguments["max_version"]);
    }
  }
  return method(**arguments);
}

}  // namespace

ManagedTensor::~ManagedTensor() {
  if (plain_ != nullptr && plain_->deleter != nullptr) plain_->deleter(plain_);
  if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
}

Array::Array(nb::handle source, const char* name, int64_t stream) : name_(name) {
  Producer& producer = producer_of(source);
  check_argument(producer.is_array, "{} is {}, must be an array that speaks DLPack", name,
                 type_text(source));
  if (producer.api == nullptr) {
    read_capsule(source, stream);
    return;
  }
  api_ = producer.api;
  DlTensor tensor;
  if (api_->view_of_object(source.ptr(), &tensor) != 0) fail_by_library(name, nb::python_error());
  read(tensor);
}

void Array::read(const DlTensor& tensor) {
  check_argument(tensor.dimensions >= 0 && tensor.dimensions <= kMaxDimensions,
                 "{} has {} axes, at most {}", name_, tensor.dimensions, kMaxDimensions);
  check_argument(tensor.dtype.lanes == 1, "{} has vector elements of {} lanes, must have 1", name_,
                 tensor.dtype.lanes);
  device_ = tensor.device;
  dtype_ = tensor.dtype;
  dimensions_ = tensor.dimensions;
  int64_t dense = 1;
  for (int32_t axis = dimensions_ - 1; axis >= 0; --axis) {
    shape_[static_cast<size_t>(axis)] = tensor.shape[axis];
    const int64_t stride = tensor.strides == nullptr ? dense : tensor.strides[axis];
    strides_[static_cast<size_t>(axis)] = tensor.shape[axis] > 1 ? stride : 0;
    dense *= tensor.shape[axis];
  }
  if (dense == 0) {
    // Libraries may give empty arrays a null address, which would mean an absent array.
    alignas(64) static char nothing[64];
    data_ = nothing;
    return;
  }
  check_argument(tensor.data != nullptr, "{} has no memory", name_);
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
}

void Array::read_capsule(nb::handle source, int64_t stream) {
  Producer& producer = producer_of(source);
  nb::object capsule;
  try {
    bool host = producer.only_host;
    if (!host) {
      const nb::object device = source.attr("__dlpack_device__")();
      host = nb::cast<int32_t>(nb::object(device[0])) != kDlCuda;
    }
    const nb::object number = host ? nb::object() : nb::object(nb::int_(stream));
    capsule = call_dlpack(source, producer, number);
  } catch (const nb::python_error& error) {
    fail_by_library(name_, error);
  } catch (const nb::cast_error&) {
    fail(ErrorCode::invalid_argument, "{}: __dlpack_device__ gave no pair of integers", name_);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* tensor = static_cast<DlManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    managed_ = ManagedTensor(tensor);
    check_argument(tensor->version.major == 1, "{} speaks DLPack {}.{}, must be 1", name_,
                   tensor->version.major, tensor->version.minor);
    read_only_ = (tensor->flags & kDlReadOnly) != 0;
    return read(tensor->tensor);
  }
  check_argument(PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0,
                 "{}: __dlpack__ returned {}, must be a DLPack capsule", name_, type_text(capsule));
  auto* tensor = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  managed_ = ManagedTensor(tensor);
  read(tensor->tensor);
}

int64_t Array::elements() const {
  int64_t product = 1;
  for (int32_t axis = 0; axis < dimensions_; ++axis) product *= extent(axis);
  return product;
}

bool Array::is_dense() const {
  int64_t dense = 1;
  for (int32_t axis = dimensions_ - 1; axis >= 0; --axis) {
    if (extent(axis) > 1 && stride(axis) != dense) return elements() == 0;
    dense *= extent(axis);
  }
  return true;
}

std::string Array::shape_text() const {
  std::string text = "[";
  for (int32_t axis = 0; axis < dimensions_; ++axis) {
    text += fmt::format("{}{}", axis > 0 ? ", " : "", extent(axis));
  }
  return text + "]";
}

void Array::check_dimensions(int32_t dimensions, const char* shape) const {
  if (dimensions_ == dimensions) return;
  fail(ErrorCode::invalid_argument, "{} has shape {}, must be {}", name_, shape_text(), shape);
}

void Array::check_extent(int32_t axis, int64_t extent, const char* shape) const {
  if (this->extent(axis) == extent) return;
  fail(ErrorCode::invalid_argument, "{} has shape {}, must be {}: axis {} must be {}", name_,
       shape_text(), shape, axis, extent);
}

void Array::check_dtype(DType dtype) const {
  const DlType wanted = dl_type(dtype);
  if (dtype_ == wanted) return;
  // numpy has no bf16 and no fp8: their bits come as unsigned integers.
  const bool bits = dtype_.code == kDlUint && dtype_.bits == wanted.bits &&
                    (dtype == DType::bf16 || dtype == DType::f16 || is_fp8(dtype));
  if (bits) return;
  fail(ErrorCode::invalid_argument, "{} has dtype {}, must be {}", name_, dtype_text(dtype_),
       dtype_name(dtype));
}

void Array::check_device(Device device) const {
  const bool pinned = device_.kind == kDlCudaHost && device.kind == DeviceKind::cpu;
  const bool same = device.kind == DeviceKind::cpu
                        ? device_.kind == kDlCpu
                        : device_.kind == kDlCuda && device_.index == device.index;
  if (same || pinned || device_.kind == kDlCudaManaged) return;
  fail(ErrorCode::invalid_argument, "{} is on {}, must be on {}", name_,
       device_.kind == kDlCpu || device_.kind == kDlCuda || device_.kind == kDlCudaHost
           ? device_name(device_of(device_))
           : fmt::format("DLPack device {}:{}", device_.kind, device_.index),
       device_name(device));
}

void Array::check_host() const { check_device(Device{}); }

void Array::check_writable() const {
  check_argument(!read_only_, "{} is read-only, must be writable", name_);
}

void Array::check_last_axis() const {
  const int64_t stride = dimensions_ == 0 ? 0 : this->stride(dimensions_ - 1);
  check_argument(stride <= 1 && stride >= 0,
                 "{} has a stride of {} elements along its last axis, must be 1", name_, stride);
  check_argument(stride == 1 || dimensions_ == 0 || extent(dimensions_ - 1) <= 1,
                 "{} has a stride of 0 along its last axis of {}, must be 1", name_,
                 dimensions_ == 0 ? 1 : extent(dimensions_ - 1));
}

void Array::check_dense() const {
  check_argument(is_dense(), "{} of shape {} is not dense, must be", name_, shape_text());
}

bool is_given(nb::handle object) { return object.is_valid() && !object.is_none(); }

std::string dtype_text(DlType dtype) {
  for (const DType known : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2,
                            DType::i32, DType::i64, DType::u8}) {
    if (dl_type(known) == dtype) return std::string(dtype_name(known));
  }
  switch (dtype.code) {
    case kDlInt:
      return fmt::format("int{}", dtype.bits);
    case kDlUint:
      return fmt::format("uint{}", dtype.bits);
    case kDlFloat:
      return fmt::format("float{}", dtype.bits);
    case kDlBool:
      return "bool";
    default:
      return fmt::format("DLPack type {} of {} bits", dtype.code, dtype.bits);
  }
}

DlType dl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {kDlFloat, 32, 1};
    case DType::f16:
      return {kDlFloat, 16, 1};
    case DType::bf16:
      return {kDlBfloat, 16, 1};
    case DType::f8e4m3:
      return {kDlFloat8E4m3fn, 8, 1};
    case DType::f8e5m2:
      return {kDlFloat8E5m2, 8, 1};
    case DType::i32:
      return {kDlInt, 32, 1};
    case DType::i64:
      return {kDlInt, 64, 1};
    case DType::u8:
      return {kDlUint, 8, 1};
  }
  return {};
}

DlDevice dl_device(Device device) {
  return {device.kind == DeviceKind::cpu ? kDlCpu : kDlCuda, device.index};
}

Device device_of(DlDevice device) {
  const bool gpu = device.kind == kDlCuda || device.kind == kDlCudaManaged;
  return gpu ? Device{DeviceKind::cuda, device.index} : Device{};
}

namespace {

template <typename Integer, typename Element>
void copy_integers(const Array& array, std::vector<Integer>& out) {
  const auto* first = reinterpret_cast<const Element*>(array.data());
  for (int64_t i = 0; i < array.extent(0); ++i) {
    const int64_t value = first[i * array.stride(0)];
    check_argument(value >= std::numeric_limits<Integer>::min() &&
                       value <= std::numeric_limits<Integer>::max(),
                   "{}[{}] is {}, must fit {} bits", array.name(), i, value, 8 * sizeof(Integer));
    out.push_back(static_cast<Integer>(value));
  }
}

}  // namespace

template <typename Integer>
std::vector<Integer> integers_of(nb::handle source, const char* name) {
  std::vector<Integer> out;
  if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
    const Py_ssize_t size = PySequence_Size(source.ptr());
    out.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const nb::object item = nb::steal(PySequence_GetItem(source.ptr(), i));
      out.push_back(integer_from<Integer>(item, fmt::format("{}[{}]", name, i)));
    }
    return out;
  }
  check_argument(producer_of(source).is_array, "{} is {}, must be a list or array of integers",
                 name, type_text(source));
  const Array array(source, name);
  array.check_host();
  array.check_dimensions(1, "[count]");
  out.reserve(static_cast<size_t>(array.extent(0)));
  if (array.dtype() == dl_type(DType::i32)) {
    copy_integers<Integer, int32_t>(array, out);
  } else if (array.dtype() == dl_type(DType::i64)) {
    copy_integers<Integer, int64_t>(array, out);
  } else {
    fail(ErrorCode::invalid_argument, "{} has dtype {}, must be int32 or int64", name,
         dtype_text(array.dtype()));
  }
  return out;
}

template std::vector<int32_t> integers_of<int32_t>(nb::handle, const char*);
template std::vector<int64_t> integers_of<int64_t>(nb::handle, const char*);

}  // namespace fovea::python
