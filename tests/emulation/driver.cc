// SPDX-License-Identifier: Apache-2.0
// A CUDA driver and a compiler for the emulated GPU. They replace gpu/driver.cc and gpu/nvrtc.cc;
// everything above these is the library itself. "Machine code" is the path of a library that the
// build made from module.cc. Device memory is host memory of exactly the requested size, filled
// with NaN at first. Where a GPU leaves an order open, the launches of a kernel alternate between
// the possible ones (policy_of). A launch that overlaps with its predecessor runs as far as it can
// before the predecessor continues. Functions that are null in the table are not emulated.
#include "gpu/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "emulation/graphs.h"
#include "emulation/launch.h"
#include "emulation/tensor_map.h"
#include "gpu/nvrtc.h"
#include "support/poison.h"

namespace fovea::gpu {
namespace {

using emulation::EncodedTensorMap;
using emulation::Graph;
using emulation::KernelNode;
using emulation::Policy;

constexpr CUresult kFailed = 999;
constexpr size_t kAlignment = 256;
constexpr int kSm = 90;

int from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}
// Few enough for the plans to cut small batches.
int multiprocessors() {
  static const int count = from_environment("FOVEA_EMULATED_MULTIPROCESSORS", 3);
  return count;
}

struct Function {
  emulation::LaunchFunction* launch;
  emulation::FinishFunction* finish;
  size_t params_bytes;
  int* launches;  // also counts launches before the library was reloaded
};

// Kernels by library.
std::map<CUmodule, Function>& functions() {
  static std::map<CUmodule, Function> all;
  return all;
}

// Library paths in a cache on disk would belong to another build, and tests run here whatever
// device the environment selects.
__attribute__((constructor)) void set_environment() {
  setenv("FOVEA_KERNEL_PACK", "", 1);
  setenv("FOVEA_KERNEL_CACHE", "", 1);
  setenv("FOVEA_TEST_DEVICE", "cuda", 1);
}

// Four launches cover each pair of two choices; the last mixes early and late copies.
Policy policy_of(Function& function) {
  static const int forced = from_environment("FOVEA_EMULATED_POLICY", -1);
  constexpr Policy kPolicies[] = {{false, true, Policy::late, false},
                                  {true, true, Policy::early, true},
                                  {true, false, Policy::late, false},
                                  {false, false, Policy::mixed, true}};
  const int number = forced >= 0 ? forced : (*function.launches)++;
  return kPolicies[static_cast<size_t>(number) % std::size(kPolicies)];
}

// The last launch, unless it has ended.
class Unfinished {
 public:
  void set(emulation::Run* run, emulation::FinishFunction* how) {
    run_ = run;
    how_ = how;
  }
  std::function<void()> finisher() {
    if (!run_) return nullptr;
    return [run = std::exchange(run_, nullptr), how = how_] { how(run); };
  }
  void finish() {
    if (const auto finish = finisher()) finish();
  }

 private:
  emulation::Run* run_ = nullptr;
  emulation::FinishFunction* how_ = nullptr;
};
Unfinished unfinished;
emulation::Streams streams;

// Operations that are not kernels wait for the preceding one.
void tell(Stream stream, std::function<void()> work) {
  streams.tell(stream, [work = std::move(work)] {
    unfinished.finish();
    work();
  });
}

CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case kAttributeMultiprocessorCount:
      *value = multiprocessors();
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

CUresult find_function(CUfunction* function, CUmodule module, const char*) {
  static std::map<std::string, int> launches;  // by library
  Dl_info library;
  if (!dladdr(dlsym(module, "emulated_launch"), &library)) return kFailed;
  Function& found = functions()[module];
  found = {reinterpret_cast<emulation::LaunchFunction*>(dlsym(module, "emulated_launch")),
           reinterpret_cast<emulation::FinishFunction*>(dlsym(module, "emulated_finish")),
           *static_cast<const size_t*>(dlsym(module, "emulated_params_bytes")),
           &launches[library.dli_fname]};
  *function = reinterpret_cast<CUfunction>(&found);
  return kCudaSuccess;
}

CUresult find_global(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  constexpr size_t kTraitsBytes = 16;  // the only global that kernels have
  *address = reinterpret_cast<CUdeviceptr>(dlsym(module, name));
  *bytes = kTraitsBytes;
  return *address ? kCudaSuccess : kFailed;
}

void launch_now(const KernelNode& kernel) {
  auto& function = *reinterpret_cast<Function*>(kernel.function);
  emulation::Launch launch{.grid = {kernel.config.grid_x, kernel.config.grid_y, 1},
                           .multiprocessors = static_cast<uint32_t>(multiprocessors()),
                           .policy = policy_of(function)};
  for (const CUlaunchAttribute& attribute : kernel.attributes) {
    if (attribute.id == kLaunchAttributeClusterDimension) {
      launch.cluster = attribute.value.cluster.x;
    } else if (attribute.value.programmatic_stream_serialization) {
      launch.finish_previous = unfinished.finisher();
    }
  }
  unfinished.finish();
  unfinished.set(function.launch(launch, kernel.params.data()), function.finish);
}

CUresult launch(const CUlaunchConfig* config, CUfunction handle, void** arguments, void**) {
  KernelNode kernel{
      .function = handle,
      .config = *config,
      .attributes = {config->attributes, config->attributes + config->attribute_count}};
  kernel.set_params(arguments[0], reinterpret_cast<Function*>(handle)->params_bytes);
  if (streams.captures(config->stream)) {
    streams.add({.kernel = std::move(kernel)});
  } else {
    launch_now(kernel);
  }
  return kCudaSuccess;
}

// The first kernel of a graph does not overlap with earlier work.
CUresult launch_graph(CUgraphExec exec, Stream) {
  unfinished.finish();
  for (const auto& node : *reinterpret_cast<const Graph*>(exec)) {
    node->other ? node->other() : launch_now(node->kernel);
  }
  return kCudaSuccess;
}

CUresult set_kernel(CUgraphExec exec, CUgraphNode captured, const CUkernelNodeParams* params) {
  for (const auto& node : *reinterpret_cast<const Graph*>(exec)) {
    if (reinterpret_cast<CUgraphNode>(node->captured.get()) != captured) continue;
    KernelNode& kernel = node->kernel;
    kernel.config.grid_x = params->grid_x;
    kernel.config.grid_y = params->grid_y;
    kernel.set_params(params->arguments[0],
                      reinterpret_cast<Function*>(kernel.function)->params_bytes);
    return kCudaSuccess;
  }
  return kFailed;
}

CUresult capture_info(Stream, CUstreamCaptureStatus*, unsigned long long*, CUgraph*,
                      const CUgraphNode** nodes, const void**, size_t*) {
  static CUgraphNode last;
  last = reinterpret_cast<CUgraphNode>(streams.last());
  *nodes = &last;
  return kCudaSuccess;
}

CUresult active_clusters(int* clusters, CUfunction, const CUlaunchConfig* config) {
  *clusters = multiprocessors() / static_cast<int>(config->attributes[0].value.cluster.x);
  return kCudaSuccess;
}

CUresult encode(void* map, int, uint32_t rank, void* data, const uint64_t* sizes,
                const uint64_t* strides, const uint32_t* box, const uint32_t*, int, int, int, int) {
  EncodedTensorMap encoded{
      .tag = EncodedTensorMap::kTag, .data = static_cast<char*>(data), .rank = rank};
  if (rank < 1 || rank > EncodedTensorMap::kMaxRank) return kFailed;
  std::copy_n(sizes, rank, encoded.sizes.begin());
  std::copy_n(strides, rank - 1, encoded.strides.begin());
  std::copy_n(box, rank, encoded.box.begin());
  if (!encoded.is_valid()) return kFailed;
  std::memcpy(map, &encoded, sizeof(encoded));
  return kCudaSuccess;
}

CUresult replace_address(void* map, void* data) {
  auto* encoded = static_cast<EncodedTensorMap*>(map);
  encoded->data = static_cast<char*>(data);
  return encoded->is_valid() ? kCudaSuccess : kFailed;
}

void fill_device(Driver& driver) {
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
}

void fill_memory(Driver& driver) {
  driver.memory_allocate = allocate;
  driver.memory_free = [](CUdeviceptr address) {
    unfinished.finish();
    std::free(reinterpret_cast<void*>(address));
    return kCudaSuccess;
  };
  driver.copy_to_device = [](CUdeviceptr to, const void* from, size_t bytes, Stream stream) {
    tell(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
    return kCudaSuccess;
  };
  driver.copy_to_host = [](void* to, CUdeviceptr from, size_t bytes, Stream stream) {
    tell(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
    return kCudaSuccess;
  };
  driver.copy_on_device = [](CUdeviceptr to, CUdeviceptr from, size_t bytes, Stream stream) {
    const auto* source = reinterpret_cast<const void*>(from);
    tell(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), source, bytes); });
    return kCudaSuccess;
  };
  driver.fill_words = [](CUdeviceptr to, unsigned value, size_t count, Stream stream) {
    tell(stream, [=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); });
    return kCudaSuccess;
  };
  driver.fill_bytes = [](CUdeviceptr to, unsigned char value, size_t bytes, Stream stream) {
    tell(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
    return kCudaSuccess;
  };
}

void fill_streams(Driver& driver) {
  driver.stream_create = [](Stream* stream, unsigned) {
    return *stream = streams.create(), kCudaSuccess;
  };
  driver.stream_destroy = [](Stream) { return kCudaSuccess; };
  driver.stream_synchronize = [](Stream) { return unfinished.finish(), kCudaSuccess; };
  driver.stream_is_capturing = [](Stream stream, CUstreamCaptureStatus* status) {
    *status = static_cast<CUstreamCaptureStatus>(streams.captures(stream));
    return kCudaSuccess;
  };
  driver.stream_capture_info = capture_info;
  driver.stream_begin_capture = [](Stream stream, CUstreamCaptureMode) {
    return streams.begin_capture(stream), kCudaSuccess;
  };
  driver.stream_end_capture = [](Stream, CUgraph* graph) {
    *graph = reinterpret_cast<CUgraph>(new Graph(streams.end_capture()));
    return kCudaSuccess;
  };
  driver.graph_instantiate = [](CUgraphExec* exec, CUgraph graph, unsigned long long) {
    *exec = reinterpret_cast<CUgraphExec>(
        new Graph(emulation::instantiate(*reinterpret_cast<const Graph*>(graph))));
    return kCudaSuccess;
  };
  driver.graph_exec_set_kernel = set_kernel;
  driver.graph_launch = launch_graph;
  driver.graph_exec_destroy = [](CUgraphExec exec) {
    return delete reinterpret_cast<Graph*>(exec), kCudaSuccess;
  };
  driver.graph_destroy = [](CUgraph graph) {
    return delete reinterpret_cast<Graph*>(graph), kCudaSuccess;
  };
}

void fill_kernels(Driver& driver) {
  driver.module_load = load_module;
  driver.module_unload = [](CUmodule module) {
    unfinished.finish();
    functions().erase(module);
    return dlclose(module);
  };
  driver.module_function = find_function;
  driver.module_global = find_global;
  driver.tensor_map_encode = encode;
  driver.tensor_map_replace_address = replace_address;
  driver.function_set_attribute = [](CUfunction, CUfunction_attribute, int) {
    return kCudaSuccess;
  };
  driver.max_active_clusters = active_clusters;
  driver.launch = launch;
}

Driver emulated() {
  Driver driver;
  fill_device(driver);
  fill_memory(driver);
  fill_streams(driver);
  fill_kernels(driver);
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

// Returns the library's path as the compiled code.
CompileOutput compile(const CompileInput& input) {
  std::string name = input.name;
  std::ranges::replace(name, '/', '_');
  return {.cubin = fmt::format("{}/{}.so", FOVEA_EMULATED_KERNELS, name)};
}

ResourceUse parse_resource_use(std::string_view, std::string_view) { return {}; }

}  // namespace fovea::gpu
