// SPDX-License-Identifier: Apache-2.0
// Caches of the cases: memory full of noise, and pools that lie in it.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"
#include "fovea/kv_cache.h"
#include "gpu/gpu.h"

namespace fovea::bench {

// Device memory the cases take turns to use as caches. Its noise is never written by a case: the
// timed calls attend to what is there (save_kv is false), as the peers' do.
struct CacheMemory {
  gpu::DeviceBuffer values;  // bf16 or e4m3 noise, whatever the last case needed
  gpu::DeviceBuffer scales;  // f32, positive
  DType dtype = DType::f32;  // of the noise; f32: none yet
  bool mla_fp8_rows = false;
};

// Enqueues the noise that the case's cache needs, if another lies there.
void make_noise(const GpuCase& config, MeasureKernels& kernels, CacheMemory& memory, Stream stream);

// Caches over memory somebody else owns: every layer has an equal part.
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
