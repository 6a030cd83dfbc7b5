// SPDX-License-Identifier: Apache-2.0
// The one block of memory of a KV pool, on the CPU or on a GPU.
#pragma once

#include <optional>

#include "gpu/gpu.h"
#include "kvcache/pool_layout.h"
#include "kvcache/zeroed_memory.h"

namespace fovea {

class PoolMemory {
 public:
  // Zeroed, given scales 1. Errors as make_kv_pool; `what` names the pool in them.
  PoolMemory(const KvPoolLayout& layout, int32_t layers, Device device, const char* what);

  char* data() const { return data_; }
  Device device() const { return device_; }
  // Null on the CPU. It must be bound before device memory is touched.
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
