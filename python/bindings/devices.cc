// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/devices.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <charconv>
#include <map>

#include "fovea/gpu.h"
#include "python/bindings/array.h"
#include "python/bindings/module.h"
#include "python/bindings/value_type.h"

namespace fovea {

static bool operator==(const DeviceInfo& a, const DeviceInfo& b) {
  return a.kind == b.kind && a.index == b.index && a.name == b.name && a.sm == b.sm &&
         a.isa == b.isa && a.cores == b.cores && a.memory_bytes == b.memory_bytes;
}

}  // namespace fovea

namespace fovea::python {

template <>
std::span<const Field<DeviceInfo>> fields_of<DeviceInfo>() {
  using Info = DeviceInfo;
  static constexpr Field<Info> table[] = {field<&Info::kind>("kind"),
                                          field<&Info::index>("index"),
                                          field<&Info::name>("name"),
                                          field<&Info::sm>("sm"),
                                          field<&Info::isa>("isa"),
                                          field<&Info::cores>("cores"),
                                          field<&Info::memory_bytes>("memory_bytes")};
  return table;
}

namespace {

Device parse_device(const std::string& text, const char* name) {
  constexpr std::string_view kCuda = "cuda:";
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::cuda, 0};
  Device device{DeviceKind::cuda, 0};
  const char* const end = text.data() + text.size();
  if (text.starts_with(kCuda)) {
    const auto [rest, error] = std::from_chars(text.data() + kCuda.size(), end, device.index);
    if (error == std::errc{} && rest == end && device.index >= 0) return device;
  }
  fail(ErrorCode::invalid_argument, "{} is '{}', known: cpu, cuda, cuda:N", name, text);
}

// Pools by number of threads. A forked process begins anew, because it has no workers.
std::shared_ptr<ThreadPool> shared_threads(int threads) {
  static std::map<std::pair<pid_t, int>, std::weak_ptr<ThreadPool>> pools;
  std::weak_ptr<ThreadPool>& known = pools[{getpid(), threads}];
  std::shared_ptr<ThreadPool> pool = known.lock();
  if (pool == nullptr) known = pool = std::make_shared<ThreadPool>(threads);
  return pool;
}

Stream stream_at(nb::handle address, const char* name) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(unsigned_from(address, name)));
}

}  // namespace

Device device_from(nb::handle object, const char* name) {
  if (PyUnicode_Check(object.ptr())) return parse_device(string_from(object, name), name);
  const Device* device = nullptr;
  if (nb::try_cast(object, device) && device != nullptr) return *device;
  const DeviceInfo* info = nullptr;
  if (nb::try_cast(object, info) && info != nullptr) return info->device();
  fail(ErrorCode::invalid_argument, "{} is {}, must be a device or its name", name,
       value_text(object));
}

DeviceInfo device_info_from(nb::handle object, const char* name) {
  const DeviceInfo* info = nullptr;
  if (nb::try_cast(object, info) && info != nullptr) return *info;
  return find_device(device_name(device_from(object, name)));
}

std::shared_ptr<ThreadPool> threads_from(nb::handle object, const char* name) {
  if (!is_given(object)) return shared_threads(0);
  const Threads* threads = nullptr;
  if (nb::try_cast(object, threads) && threads != nullptr) return threads->pool;
  return shared_threads(integer_from<int>(object, name));
}

Stream stream_from(nb::handle object, Device device, const DlExchangeApi* api) {
  if (!is_given(object)) {
    void* stream = nullptr;
    if (device.kind == DeviceKind::cuda && api != nullptr && api->current_stream != nullptr) {
      const int status = api->current_stream(kDlCuda, device.index, &stream);
      if (status != 0) throw nb::python_error();
    }
    return static_cast<Stream>(stream);
  }
  if (PyLong_Check(object.ptr())) return stream_at(object, "stream");
  if (PyObject_HasAttrString(object.ptr(), "cuda_stream") != 0) {
    return stream_at(object.attr("cuda_stream"), "stream.cuda_stream");
  }
  check_argument(PyObject_HasAttrString(object.ptr(), "__cuda_stream__") != 0,
                 "stream is {}, must be an address or have cuda_stream or __cuda_stream__",
                 value_text(object));
  nb::object pair = object.attr("__cuda_stream__");
  if (PyCallable_Check(pair.ptr()) != 0) pair = pair();
  check_argument(PyTuple_Check(pair.ptr()) && PyTuple_Size(pair.ptr()) == 2,
                 "stream.__cuda_stream__ is {}, must be (version, address)", value_text(pair));
  return stream_at(nb::handle(PyTuple_GetItem(pair.ptr(), 1)), "stream.__cuda_stream__");
}

void bind_devices(nb::module_& module) {
  nb::class_<Device>(module, "Device",
                     "A processor: the CPU, or the GPU that the driver lists at `index`. str() "
                     "gives \"cpu\" or \"cuda:0\".",
                     nb::is_final())
      .def(
          "__init__",
          [](Device* self, nb::handle name) { new (self) Device(device_from(name, "name")); },
          nb::arg("name") = "cpu", nb::sig("def __init__(self, name: str = 'cpu') -> None"))
      .def_prop_ro("kind", [](const Device& self) { return self.kind; })
      .def_prop_ro("index", [](const Device& self) { return self.index; })
      .def("__eq__",
           [](const Device& self, nb::handle other) -> nb::object {
             const Device* device = nullptr;
             if (!nb::try_cast(other, device) || device == nullptr) {
               return nb::borrow(Py_NotImplemented);
             }
             return nb::bool_(self == *device);
           })
      .def("__hash__",
           [](const Device& self) { return 2 * self.index + (self.kind == DeviceKind::cuda); })
      .def("__str__", [](const Device& self) { return device_name(self); })
      .def("__repr__",
           [](const Device& self) { return fmt::format("Device('{}')", device_name(self)); })
      .def("__getstate__", [](const Device& self) { return device_name(self); })
      .def("__setstate__", [](Device& self, const std::string& state) {
        new (&self) Device(parse_device(state, "name"));
      });
  bind_value_type<DeviceInfo>(
      module, "DeviceInfo",
      "def __init__(self, *, kind: DeviceKind | str = 'cpu', index: int = 0, name: str = '', sm: "
      "int = 0, isa: str = '', cores: int = 1, memory_bytes: int = 0) -> None",
      "A device and its properties. Construct one to select backends for a GPU that this machine "
      "lacks.")
      .def_prop_ro("device", &DeviceInfo::device);
  nb::class_<Threads>(module, "ThreadPool",
                      "The threads that CPU kernels run on. 0: one per core available to this "
                      "process.",
                      nb::is_final())
      .def(
          "__init__",
          [](Threads* self, nb::handle threads) {
            new (self) Threads{std::make_shared<ThreadPool>(integer_from<int>(threads, "threads"))};
          },
          nb::arg("threads") = 0, nb::sig("def __init__(self, threads: int = 0) -> None"))
      .def_prop_ro("size", [](const Threads& self) { return self.pool->size(); });
  module.def(
      "devices",
      [] {
        std::vector<DeviceInfo> all = gpu_devices();
        all.insert(all.begin(), cpu_device());
        return all;
      },
      "Returns the CPU, then every GPU that the driver lists.");
  module.def(
      "find_device", [](nb::handle name) { return find_device(string_from(name, "name")); },
      nb::arg("name"), nb::sig("def find_device(name: str) -> DeviceInfo"),
      "Returns the device named \"cpu\", \"cuda\" (the first GPU) or \"cuda:N\".");
  module.def("why_no_gpu", &why_no_gpu, "Returns why no GPU can be used; empty: there is one.");
}

}  // namespace fovea::python
