// SPDX-License-Identifier: Apache-2.0
// The block of memory of a pool, on the CPU or on a GPU.
#pragma once

#include <optional>

#include "gpu/gpu.h"
#include "kvcache/pool_layout.h"
#include "kvcache/zeroed_memory.h"

namespace fovea {

class PoolMemory {
 public:
  // Zeroes the memory. Throws the errors of make_kv_pool, in which `what` names the pool.
  PoolMemory(int64_t bytes, Device device, const char* what);
  // The memory of a KV pool, in which scales supplied by the caller start at 1.
  PoolMemory(const KvPoolLayout& layout, int32_t layers, Device device, const char* what);

  char* data() const { return data_; }
  Device device() const { return device_; }
  // Returns null on the CPU. Callers bind it before they access device memory.
  const gpu::Context* context() const { return gpu_ ? &gpu_->context : nullptr; }

 private:
  struct OnGpu {
    OnGpu(int device, size_t bytes) : context(device), buffer(bytes) {}
    ~OnGpu() { context.bind_to_free(); }

    gpu::Context context;
    gpu::DeviceBuffer buffer;
  };

  Device device_;
  std::optional<ZeroedMemory> cpu_;
  std::optional<OnGpu> gpu_;
  char* data_ = nullptr;
};

}  // namespace fovea
