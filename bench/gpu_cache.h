// SPDX-License-Identifier: Apache-2.0
// Caches of the cases: memory filled with noise, and pools over it.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"
#include "fovea/kv_cache.h"
#include "gpu/gpu.h"

namespace fovea::bench {

// Device memory that all cases use as caches, one after another. Cases never overwrite its noise:
// like the peers, timed calls attend to existing keys (save_kv is false).
struct CacheMemory {
  gpu::DeviceBuffer values;  // bf16 or e4m3 noise, as required by the last case
  gpu::DeviceBuffer scales;  // f32, positive
  DType dtype = DType::f32;  // dtype of the noise; f32 before the first case
  bool mla_fp8_rows = false;
};

// Enqueues the noise that the case needs, unless the memory contains it already.
void make_noise(const GpuCase& config, MeasureKernels& kernels, CacheMemory& memory, Stream stream);

// Caches over memory that another object owns. All layers have equal shares.
class LentPool : public KvPool {
 public:
  LentPool(const KvCacheSpec& spec, const CacheMemory& memory, int64_t pages, Device device);
  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t index) const override { return views_[static_cast<size_t>(index)]; }
  Device device() const override { return device_; }

 private:
  KvCacheSpec spec_;
  int64_t pages_;
  Device device_;
  std::vector<KvLayerView> views_;
};

}  // namespace fovea::bench
