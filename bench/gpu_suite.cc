// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_suite.h"

#include <algorithm>
#include <cstdlib>

#include "gpu/gpu.h"

namespace fovea::bench {
namespace {

constexpr size_t kMostPoolBytes = size_t{40} << 30;

size_t pool_bytes() {
  size_t free = 0;
  size_t total = 0;
  gpu::check(gpu::driver().memory_info(&free, &total), "cuMemGetInfo");
  return std::min(kMostPoolBytes, free / 2);
}

gpu::KernelStoreOptions store_options() {
  const char* pack = std::getenv("FOVEA_KERNEL_PACK");
  return {.pack_path = pack ? pack : ""};
}

}  // namespace

struct GpuBench::Setup {
  explicit Setup(int device) : context(device), store(store_options()), memory(pool_bytes()) {}
  gpu::Context context;
  gpu::KernelStore store;
  MeasureKernels kernels{context, store};
  gpu::OwnedStream stream;
  gpu::DeviceBuffer memory;
};

GpuBench::GpuBench(int device) : setup_(std::make_unique<Setup>(device)) {}
GpuBench::~GpuBench() = default;

const DeviceInfo& GpuBench::device() const { return setup_->context.info(); }

GpuCeilings GpuBench::ceilings(PowerState state) {
  return measure_gpu_ceilings(setup_->kernels, setup_->memory, state, setup_->stream.get());
}

}  // namespace fovea::bench
