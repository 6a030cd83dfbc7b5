// SPDX-License-Identifier: Apache-2.0
// A CUDA driver and a compiler for the emulated GPU, in the place of gpu/driver.cc and
// gpu/nvrtc.cc: everything above them is the library's own. "Machine code" is the path of a library
// that the build made of module.cc. Device memory is host memory, exact to the byte and NaN at
// first. A launch is over when it returns; launches take threads and blocks in ascending and in
// descending order by turns. What is null in the table is not emulated: graphs, streams, events.
#include "gpu/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/check.h"
#include "gpu/nvrtc.h"
#include "support/poison.h"

namespace fovea::gpu {
namespace {

constexpr CUresult kFailed = 999;
constexpr size_t kAlignment = 256;
constexpr int kMultiprocessors = 3;  // so few that the plans cut small batches
constexpr int kSm = 90;

using Launch = void(uint32_t grid_x, uint32_t grid_y, bool descending, void** arguments);

CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case kAttributeMultiprocessorCount:
      *value = kMultiprocessors;
      break;
    case kAttributeComputeCapabilityMajor:
      *value = kSm / 10;
      break;
    case kAttributeComputeCapabilityMinor:
      *value = kSm % 10;
      break;
  }
  return kCudaSuccess;
}

CUresult allocate(CUdeviceptr* address, size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes) != 0) return kCudaErrorOutOfMemory;
  std::memset(memory, test::kPoisonByte, bytes);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return kCudaSuccess;
}

CUresult load_module(CUmodule* module, const void* image) {
  *module = static_cast<CUmodule>(
      static_cast<void*>(dlopen(static_cast<const char*>(image), RTLD_NOW | RTLD_LOCAL)));
  return *module ? kCudaSuccess : kFailed;
}

CUresult find_global(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  constexpr size_t kTraitsBytes = 16;  // the only global there is
  *address = reinterpret_cast<CUdeviceptr>(dlsym(module, name));
  *bytes = kTraitsBytes;
  return *address ? kCudaSuccess : kFailed;
}

CUresult launch(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  static bool descending = true;
  descending = !descending;
  reinterpret_cast<Launch*>(function)(config->grid_x, config->grid_y, descending, arguments);
  return kCudaSuccess;
}

Driver emulated() {
  Driver driver;
  driver.error_name = [](CUresult, const char** text) { return *text = "emulation", kCudaSuccess; };
  driver.error_string = [](CUresult, const char** text) {
    const char* reason = dlerror();
    return *text = reason ? reason : "no reason", kCudaSuccess;
  };
  driver.device_count = [](int* count) { return *count = 1, kCudaSuccess; };
  driver.device_get = [](CUdevice* device, int) { return *device = 0, kCudaSuccess; };
  driver.device_name = [](char* name, int bytes, CUdevice) {
    std::strncpy(name, "emulated", static_cast<size_t>(bytes));
    return kCudaSuccess;
  };
  driver.device_attribute = attribute;
  driver.device_total_memory = [](size_t* bytes, CUdevice) {
    return *bytes = size_t{1} << 30, kCudaSuccess;
  };
  driver.context_retain = [](CUcontext*, CUdevice) { return kCudaSuccess; };
  driver.context_release = [](CUdevice) { return kCudaSuccess; };
  driver.context_set = [](CUcontext) { return kCudaSuccess; };
  driver.memory_allocate = allocate;
  driver.memory_free = [](CUdeviceptr address) {
    std::free(reinterpret_cast<void*>(address));
    return kCudaSuccess;
  };
  driver.copy_to_device = [](CUdeviceptr to, const void* from, size_t bytes, Stream) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return kCudaSuccess;
  };
  driver.copy_to_host = [](void* to, CUdeviceptr from, size_t bytes, Stream) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return kCudaSuccess;
  };
  driver.fill_bytes = [](CUdeviceptr to, unsigned char value, size_t bytes, Stream) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return kCudaSuccess;
  };
  driver.stream_synchronize = [](Stream) { return kCudaSuccess; };
  driver.module_load = load_module;
  driver.module_unload = [](CUmodule module) { return dlclose(module); };
  driver.module_function = [](CUfunction* function, CUmodule module, const char*) {
    *function = reinterpret_cast<CUfunction>(dlsym(module, "emulated_launch"));
    return *function ? kCudaSuccess : kFailed;
  };
  driver.module_global = find_global;
  driver.function_set_attribute = [](CUfunction, CUfunction_attribute, int) {
    return kCudaSuccess;
  };
  driver.launch = launch;
  return driver;
}

}  // namespace

const std::string& why_no_driver() {
  static const std::string nothing;
  return nothing;
}

const Driver& driver() {
  static const Driver driver = emulated();
  return driver;
}

void check(CUresult result, std::string_view call) {
  if (result == kCudaSuccess) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  fail(ErrorCode::unsupported, "{}: {}", call, text);
}

const std::string& why_no_nvrtc() { return why_no_driver(); }
std::string nvrtc_version() { return "emulation"; }

// The library's path.
CompileOutput compile(const CompileInput& input) {
  std::string name = input.name;
  std::ranges::replace(name, '/', '_');
  return {.cubin = fmt::format("{}/{}.so", FOVEA_EMULATED_KERNELS, name)};
}

ResourceUse parse_resource_use(std::string_view, std::string_view) { return {}; }

}  // namespace fovea::gpu
