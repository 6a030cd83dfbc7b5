// SPDX-License-Identifier: Apache-2.0
#include "kvcache/pool_memory.h"

#include "core/check.h"

namespace fovea {
namespace {

// As initialise_scales(), for device memory.
void fill_given_scales(const KvPoolLayout& layout, char* base, int32_t layers) {
  if (layout.view.scale == KvScale::none || layout.view.scale == KvScale::per_token_head) return;
  for (int32_t layer = 0; layer < layers; ++layer) {
    const KvLayerView view = kv_layer_view(layout, base, layer);
    gpu::fill_floats(view.k_scale, 1, static_cast<size_t>(layout.scales), nullptr);
    gpu::fill_floats(view.v_scale, 1, static_cast<size_t>(layout.scales), nullptr);
  }
}

}  // namespace

PoolMemory::PoolMemory(const KvPoolLayout& layout, int32_t layers, Device device, const char* what)
    : device_(device) {
  if (device.kind == DeviceKind::cpu) {
    cpu_.emplace(layout.total_bytes, what);
    data_ = cpu_->data();
    initialise_scales(layout, data_, layers);
    return;
  }
  const auto bytes = static_cast<size_t>(layout.total_bytes);
  try {
    gpu_.emplace(device.index, bytes);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{} on {}: {}", what, device_name(device), error.what()));
  }
  data_ = gpu_->buffer.data<char>();
  gpu::fill_bytes(data_, 0, bytes, nullptr);
  fill_given_scales(layout, data_, layers);
  gpu::synchronize(nullptr);
}

}  // namespace fovea
