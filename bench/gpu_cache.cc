// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_cache.h"

#include "kernels/mla_row.h"

namespace fovea::bench {
namespace {

// Values in e4m3 are noise times this constant, and scales are its inverse, so keys are normal.
constexpr float kFp8Spread = 100;

// Fills the memory with adjacent rows of kernels/mla_row.h.
void make_mla_rows(MeasureKernels& kernels, const gpu::DeviceBuffer& memory, Stream stream) {
  using namespace fovea::kernels;
  constexpr int64_t kScales = kMlaRowLatent / kMlaRowScaleGroup;
  const auto rows = static_cast<int64_t>(memory.bytes()) / kMlaRowBytes;
  char* base = memory.data<char>();
  kernels.fill_noise(base, DType::f8e4m3, rows * kMlaRowLatent, 1, kFp8Spread, 0, stream,
                     kMlaRowLatent, kMlaRowBytes);
  kernels.fill_noise(base + kMlaRowScaleOffset, DType::f32, rows * kScales, 2, 0.1f / kFp8Spread,
                     1 / kFp8Spread, stream, kScales, kMlaRowBytes / 4);
  kernels.fill_noise(base + kMlaRowRopeOffset, DType::bf16, rows * kMlaRowRope, 3, 1, 0, stream,
                     kMlaRowRope, kMlaRowBytes / 2);
}

}  // namespace

void make_noise(const GpuCase& config, MeasureKernels& kernels, CacheMemory& memory,
                Stream stream) {
  if (memory.dtype == config.kv_dtype && memory.mla_fp8_rows == config.mla_fp8_rows) return;
  memory.dtype = config.kv_dtype;
  memory.mla_fp8_rows = config.mla_fp8_rows;
  if (config.mla_fp8_rows) {
    make_mla_rows(kernels, memory.values, stream);
    return;
  }
  const bool fp8 = is_fp8(config.kv_dtype);
  const auto elements = static_cast<int64_t>(memory.values.bytes() / dtype_bytes(config.kv_dtype));
  kernels.fill_noise(memory.values.data(), config.kv_dtype, elements, 1, fp8 ? kFp8Spread : 1, 0,
                     stream);
  if (fp8) {
    kernels.fill_noise(memory.scales.data(), DType::f32,
                       static_cast<int64_t>(memory.scales.bytes() / 4), 2, 0.1f / kFp8Spread,
                       1 / kFp8Spread, stream);
  }
}

LentPool::LentPool(const KvCacheSpec& spec, const CacheMemory& memory, int64_t pages, Device device)
    : spec_(spec), pages_(pages), device_(device) {
  const bool mla = spec.layout != KvLayout::mha;
  const bool rows = spec.layout == KvLayout::mla_fp8_rows;  // strides in bytes
  const int64_t k_row =
      rows ? static_cast<int64_t>(spec.bytes_per_page()) / spec.layers / spec.page_size
           : int64_t{spec.kv_heads} * spec.head_dim;
  const int64_t v_row = mla ? 0 : int64_t{spec.kv_heads} * spec.head_dim_v;
  const int64_t slots = pages * spec.page_size;
  const auto element = static_cast<int64_t>(dtype_bytes(spec.dtype));
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    KvLayerView view;
    view.layout = spec.layout;
    view.scale = spec.scale;
    view.dtype = spec.dtype;
    view.page_size = spec.page_size;
    view.slots = slots;
    view.k = memory.values.data<char>() + layer * slots * (k_row + v_row) * element;
    view.v = mla ? view.k : view.k + slots * k_row * element;
    view.k_page_stride = spec.page_size * k_row;
    view.k_token_stride = k_row;
    view.k_head_stride = spec.head_dim;
    view.v_page_stride = mla ? view.k_page_stride : spec.page_size * v_row;
    view.v_token_stride = mla ? k_row : v_row;
    view.v_head_stride = mla ? spec.head_dim : spec.head_dim_v;
    if (spec.scale != KvScale::none) {
      const int64_t scales = slots * spec.kv_heads;
      view.k_scale = memory.scales.data<float>() + 2 * layer * scales;
      view.v_scale = mla ? view.k_scale : view.k_scale + scales;
    }
    views_.push_back(view);
  }
}
}  // namespace fovea::bench
