// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernel.h"

#include "core/check.h"
#include "gpu/architectures.h"

namespace fovea::kernels::cuda {
namespace {

// Above this a kernel must ask the driver for its shared memory.
constexpr int kDefaultSharedBytes = 48 * 1024;

}  // namespace

Kernel::Kernel(const gpu::KernelVariant& variant, gpu::KernelStore& store) {
  overlaps_ = variant.sm >= gpu::kHopper;
  const gpu::Driver& driver = gpu::driver();
  const gpu::CompiledKernel compiled = store.get(variant);
  gpu::CUmodule module = nullptr;
  gpu::check(driver.module_load(&module, compiled.cubin.data()), "cuModuleLoadData");
  module_.reset(module);
  gpu::check(driver.module_function(&function_, module, variant.symbol.c_str()),
             "cuModuleGetFunction");
  gpu::CUdeviceptr address = 0;
  size_t bytes = 0;
  gpu::check(driver.module_global(&address, &bytes, module, kTraitsSymbol), "cuModuleGetGlobal");
  if (bytes != sizeof(traits_)) {
    fail(ErrorCode::unsupported, "{}: its traits have {} bytes, expected {}", variant.name, bytes,
         sizeof(traits_));
  }
  gpu::copy_to_host(&traits_, reinterpret_cast<void*>(address), bytes, nullptr);
  gpu::synchronize(nullptr);
  check_traits(traits_, variant.name);
  if (traits_.shared_bytes > kDefaultSharedBytes) {
    gpu::check(driver.function_set_attribute(function_, gpu::kFunctionMaxDynamicSharedSizeBytes,
                                             traits_.shared_bytes),
               "cuFuncSetAttribute");
  }
}

void Kernel::launch(GridSize grid, gpu::ParamBlock params, gpu::Launcher launcher,
                    LaunchOptions options) const {
  if (grid.x == 0 || grid.y == 0) return;
  const gpu::KernelLaunch launch = {.function = function_,
                                    .grid_x = grid.x,
                                    .grid_y = grid.y,
                                    .threads = static_cast<unsigned>(traits_.threads),
                                    .shared_bytes = static_cast<unsigned>(traits_.shared_bytes),
                                    .cluster = options.cluster,
                                    .overlapped = options.overlapped && overlaps_};
  if (launcher.group != nullptr) return launcher.group->add(launch, params);
  const gpu::LaunchConfig config(launch, launcher.stream);
  void* data = const_cast<void*>(params.data());
  gpu::check(gpu::driver().launch(config.get(), function_, &data, nullptr), "cuLaunchKernelEx");
}

void Kernel::allow_large_clusters() const {
  gpu::check(gpu::driver().function_set_attribute(function_,
                                                  gpu::kFunctionNonPortableClusterSizeAllowed, 1),
             "cuFuncSetAttribute");
}

int Kernel::active_clusters(uint32_t cluster) const {
  const gpu::Driver& driver = gpu::driver();
  gpu::CUlaunchAttribute attribute{};
  attribute.id = gpu::kLaunchAttributeClusterDimension;
  attribute.value.cluster = {cluster, 1, 1};
  const gpu::CUlaunchConfig config{.grid_x = cluster,
                                   .grid_y = 1,
                                   .grid_z = 1,
                                   .block_x = static_cast<unsigned>(traits_.threads),
                                   .block_y = 1,
                                   .block_z = 1,
                                   .shared_bytes = static_cast<unsigned>(traits_.shared_bytes),
                                   .stream = nullptr,
                                   .attributes = &attribute,
                                   .attribute_count = 1};
  int clusters = 0;
  return driver.max_active_clusters(&clusters, function_, &config) == gpu::kCudaSuccess ? clusters
                                                                                        : 0;
}

}  // namespace fovea::kernels::cuda
