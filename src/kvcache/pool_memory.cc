// SPDX-License-Identifier: Apache-2.0
#include "kvcache/pool_memory.h"

#include <algorithm>

#include "core/check.h"
#include "core/check_device.h"

namespace fovea {
namespace {

// Scales supplied by the caller start at 1: `fill` sets that many floats to it.
template <typename Fill>
void initialise_scales(const KvPoolLayout& layout, char* base, int32_t layers, Fill fill) {
  if (layout.view.scale == KvScale::none || layout.view.scale == KvScale::per_token_head) return;
  for (int32_t layer = 0; layer < layers; ++layer) {
    const KvLayerView view = kv_layer_view(layout, base, layer);
    fill(view.k_scale, static_cast<size_t>(layout.scales));
    fill(view.v_scale, static_cast<size_t>(layout.scales));
  }
}

}  // namespace

PoolMemory::PoolMemory(int64_t bytes, Device device, const char* what) : device_(device) {
  check_device(device, "device");
  if (device.kind == DeviceKind::cpu) {
    cpu_.emplace(bytes, what);
    data_ = cpu_->data();
    return;
  }
  try {
    gpu_.emplace(device.index, static_cast<size_t>(bytes));
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{} on {}: {}", what, device_name(device), error.what()));
  }
  data_ = gpu_->buffer.data<char>();
  gpu::fill_bytes(data_, 0, static_cast<size_t>(bytes), nullptr);
  gpu::synchronize(nullptr);
}

PoolMemory::PoolMemory(const KvPoolLayout& layout, int32_t layers, Device device, const char* what)
    : PoolMemory(layout.total_bytes, device, what) {
  if (!gpu_) {
    initialise_scales(layout, data_, layers,
                      [](float* scales, size_t count) { std::fill_n(scales, count, 1.0f); });
    return;
  }
  initialise_scales(layout, data_, layers, [](float* scales, size_t count) {
    gpu::fill_floats(scales, 1, count, nullptr);
  });
  gpu::synchronize(nullptr);
}

}  // namespace fovea
