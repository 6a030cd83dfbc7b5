// SPDX-License-Identifier: Apache-2.0
#include "gpu/gpu.h"

#include <bit>
#include <charconv>
#include <string>
#include <vector>

#include "core/check.h"
#include "fovea/gpu.h"

namespace fovea::gpu {
namespace {

int attribute(CUdevice_attribute which, CUdevice device) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

DeviceInfo describe(CUdevice device, int index) {
  DeviceInfo info;
  info.kind = DeviceKind::cuda;
  info.index = index;
  char name[256] = {};
  check(driver().device_name(name, sizeof(name), device), "cuDeviceGetName");
  info.name = name;
  info.sm = attribute(kAttributeComputeCapabilityMajor, device) * 10 +
            attribute(kAttributeComputeCapabilityMinor, device);
  info.cores = attribute(kAttributeMultiprocessorCount, device);
  check(driver().device_total_memory(&info.memory_bytes, device), "cuDeviceTotalMem");
  return info;
}

CUdevice device_of(int index) {
  CUdevice device = 0;
  check(driver().device_get(&device, index), "cuDeviceGet");
  return device;
}

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

void Release::operator()(Stream stream) const { driver().stream_destroy(stream); }
void Release::operator()(CUevent event) const { driver().event_destroy(event); }
void Release::operator()(CUgraph graph) const { driver().graph_destroy(graph); }
void Release::operator()(CUgraphExec exec) const { driver().graph_exec_destroy(exec); }
void Release::operator()(CUmodule module) const { driver().module_unload(module); }

Context::Context(int device) {
  int count = 0;
  check(driver().device_count(&count), "cuDeviceGetCount");
  check_argument(device >= 0 && device < count, "GPU {} does not exist, there are {}", device,
                 count);
  device_ = device_of(device);
  info_ = describe(device_, device);
  check(driver().context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  bind();
}

Context::~Context() { driver().context_release(device_); }

void Context::bind() const { check(driver().context_set(context_), "cuCtxSetCurrent"); }
void Context::bind_to_free() const noexcept { driver().context_set(context_); }

size_t Context::free_bytes() const {
  bind();
  return gpu::free_bytes();
}

bool Context::can_access(const Context& other) const {
  int can = 0;
  check(driver().can_access_peer(&can, device_, other.device_), "cuDeviceCanAccessPeer");
  return can != 0;
}

void Context::allow_access_to(const Context& other) const {
  bind();
  const CUresult result = driver().enable_peer(other.context_, 0);
  if (result != kCudaErrorPeerAccessAlreadyEnabled) check(result, "cuCtxEnablePeerAccess");
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  CUdeviceptr address = 0;
  const CUresult result = driver().memory_allocate(&address, bytes);
  if (result == kCudaErrorOutOfMemory) {
    size_t free = 0;
    size_t total = 0;
    driver().memory_info(&free, &total);
    fail(ErrorCode::out_of_memory, "{} bytes of GPU memory requested, {} of {} are free", bytes,
         free, total);
  }
  check(result, "cuMemAlloc");
  data_.reset(reinterpret_cast<void*>(address));
}

CUipcMemHandle name_of(const DeviceBuffer& buffer) {
  CUipcMemHandle name{};
  check(driver().memory_handle(&name, address_of(buffer.data())), "cuIpcGetMemHandle");
  return name;
}

OpenedMemory::OpenedMemory(const CUipcMemHandle& name) {
  constexpr unsigned kEnablePeerAccess = 1;
  CUdeviceptr address = 0;
  check(driver().memory_open(&address, name, kEnablePeerAccess), "cuIpcOpenMemHandle");
  data_.reset(reinterpret_cast<void*>(address));
}

void OpenedMemory::Close::operator()(void* data) const { driver().memory_close(address_of(data)); }

void DeviceBuffer::Free::operator()(void* data) const { driver().memory_free(address_of(data)); }

PinnedBuffer::PinnedBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check(driver().host_allocate(&data, bytes, kHostPortable), "cuMemHostAlloc");
  data_.reset(data);
}

void PinnedBuffer::Free::operator()(void* data) const { driver().host_free(data); }

void copy_to_device(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes)
    check(driver().copy_to_device(address_of(to), from, bytes, stream), "cuMemcpyHtoDAsync");
}

void copy_to_host(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes) check(driver().copy_to_host(to, address_of(from), bytes, stream), "cuMemcpyDtoHAsync");
}

void copy_on_device(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes) {
    check(driver().copy_on_device(address_of(to), address_of(from), bytes, stream),
          "cuMemcpyDtoDAsync");
  }
}

void copy_rows_on_device(void* to, const void* from, RowPitches pitches, size_t width, size_t rows,
                         Stream stream) {
  if (width == 0 || rows == 0) return;
  CUmemcpy2D copy{};
  copy.from_type = copy.to_type = kMemoryDevice;
  copy.from = address_of(from);
  copy.from_pitch = pitches.from;
  copy.to = address_of(to);
  copy.to_pitch = pitches.to;
  copy.width = width;
  copy.height = rows;
  check(driver().copy_rectangle(&copy, stream), "cuMemcpy2DAsync");
}

void fill_bytes(void* to, uint8_t value, size_t bytes, Stream stream) {
  if (bytes) check(driver().fill_bytes(address_of(to), value, bytes, stream), "cuMemsetD8Async");
}

void fill_floats(float* to, float value, size_t count, Stream stream) {
  if (count == 0) return;
  check(driver().fill_words(address_of(to), std::bit_cast<unsigned>(value), count, stream),
        "cuMemsetD32Async");
}

void synchronize(Stream stream) {
  check(driver().stream_synchronize(stream), "cuStreamSynchronize");
}

size_t free_bytes() {
  size_t free = 0;
  size_t total = 0;
  check(driver().memory_info(&free, &total), "cuMemGetInfo");
  return free;
}

OwnedStream::OwnedStream() {
  Stream stream = nullptr;
  check(driver().stream_create(&stream, kStreamNonBlocking), "cuStreamCreate");
  stream_.reset(stream);
}

Event::Event() {
  CUevent event = nullptr;
  check(driver().event_create(&event, kEventDefault), "cuEventCreate");
  event_.reset(event);
}
void Event::record(Stream stream) {
  check(driver().event_record(event_.get(), stream), "cuEventRecord");
}
bool Event::reached() const {
  const CUresult result = driver().event_query(event_.get());
  if (result == kCudaErrorNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}
void Event::wait() const { check(driver().event_synchronize(event_.get()), "cuEventSynchronize"); }
float Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0;
  check(driver().event_elapsed(&milliseconds, start.event_.get(), event_.get()),
        "cuEventElapsedTime");
  return milliseconds;
}

void Graph::begin_capture(Stream stream) {
  check(driver().stream_begin_capture(stream, kCaptureModeThreadLocal), "cuStreamBeginCapture");
}

void Graph::abandon_capture(Stream stream) {
  CUgraph graph = nullptr;
  driver().stream_end_capture(stream, &graph);
  if (graph) driver().graph_destroy(graph);
}

Graph Graph::end_capture(Stream stream) {
  Graph result;
  CUgraph graph = nullptr;
  check(driver().stream_end_capture(stream, &graph), "cuStreamEndCapture");
  result.graph_.reset(graph);
  CUgraphExec exec = nullptr;
  check(driver().graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  result.exec_.reset(exec);
  return result;
}

void Graph::launch(Stream stream) const {
  check(driver().graph_launch(exec_.get(), stream), "cuGraphLaunch");
}

}  // namespace fovea::gpu

namespace fovea {

std::vector<DeviceInfo> gpu_devices() {
  std::vector<DeviceInfo> found;
  if (!why_no_gpu().empty()) return found;
  int count = 0;
  gpu::check(gpu::driver().device_count(&count), "cuDeviceGetCount");
  for (int index = 0; index < count; ++index) {
    found.push_back(gpu::describe(gpu::device_of(index), index));
  }
  return found;
}

std::string why_no_gpu() { return gpu::why_no_driver(); }

DeviceInfo find_device(std::string_view name) {
  if (name == "cpu") return cpu_device();
  size_t index = 0;
  if (name != "cuda") {
    constexpr std::string_view kPrefix = "cuda:";
    const std::string_view digits = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : "";
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    check_argument(!digits.empty() && error == std::errc() && end == digits.data() + digits.size(),
                   "device is '{}', known: cpu, cuda, cuda:N", name);
  }
  if (!why_no_gpu().empty()) fail(ErrorCode::unsupported, "device is '{}': {}", name, why_no_gpu());
  const std::vector<DeviceInfo> devices = gpu_devices();
  check_argument(index < devices.size(), "device is '{}', there are {} GPUs", name, devices.size());
  return devices[index];
}

}  // namespace fovea
