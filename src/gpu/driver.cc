// SPDX-License-Identifier: Apache-2.0
#include "gpu/driver.h"

#include <dlfcn.h>

#include "core/check.h"

namespace fovea::gpu {
namespace {

struct Loaded {
  Driver functions;
  std::string problem;
};

Loaded load() {
  Loaded loaded;
  // The library is never closed, because the driver does not support unloading.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    loaded.problem = "no NVIDIA driver: libcuda.so.1 was not found";
    return loaded;
  }
#define FOVEA_FIND(member, name, parameters)                                                \
  loaded.functions.member = reinterpret_cast<CUresult(*) parameters>(dlsym(library, name)); \
  if (!loaded.functions.member && loaded.problem.empty()) {                                 \
    loaded.problem = "the NVIDIA driver is too old: it has no " name;                       \
  }
  FOVEA_DRIVER_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  if (!loaded.problem.empty()) return loaded;
  int devices = 0;
  if (const CUresult result = loaded.functions.init(0); result != kCudaSuccess) {
    const char* name = nullptr;
    loaded.functions.error_name(result, &name);
    loaded.problem =
        fmt::format("the NVIDIA driver did not start: {}", name ? name : "unknown error");
  } else if (loaded.functions.device_count(&devices) != kCudaSuccess || devices == 0) {
    loaded.problem = "the NVIDIA driver sees no device";
  }
  return loaded;
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

}  // namespace

const std::string& why_no_driver() { return loaded().problem; }

const Driver& driver() {
  if (!why_no_driver().empty()) fail(ErrorCode::unsupported, "{}", why_no_driver());
  return loaded().functions;
}

void check(CUresult result, std::string_view call) {
  if (result == kCudaSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  fail(result == kCudaErrorOutOfMemory ? ErrorCode::out_of_memory : ErrorCode::device_failure,
       "{}: {} ({})", call, name ? name : "unknown error", text ? text : "no description");
}

}  // namespace fovea::gpu
