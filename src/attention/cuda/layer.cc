// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/layer.h"

#include <string_view>

#include "attention/validate/batch.h"
#include "core/check.h"
#include "kernels/cuda/portable/kv_write/launch.h"
#include "kernels/cuda/portable/mla_row_write/launch.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int64_t kAlignment = 16;  // bytes that a kernel reads at once

cuda::ScaleKind scale_kind(KvScale scale) {
  switch (scale) {
    case KvScale::none:
      return cuda::kScaleNone;
    case KvScale::per_tensor:
      return cuda::kScalePerTensor;
    case KvScale::per_head:
      return cuda::kScalePerHead;
    case KvScale::per_token_head:
      return cuda::kScalePerTokenHead;
  }
  return cuda::kScaleNone;
}

void check_aligned(std::string_view name, const void* data, DType dtype,
                   std::initializer_list<int64_t> strides) {
  check_argument(reinterpret_cast<uintptr_t>(data) % kAlignment == 0,
                 "{} is at {}, a GPU needs it aligned to {} bytes", name, data, kAlignment);
  for (const int64_t stride : strides) {
    check_argument(stride * static_cast<int64_t>(dtype_bytes(dtype)) % kAlignment == 0,
                   "a stride of {} is {} elements of {}, a GPU needs a multiple of {} bytes", name,
                   stride, dtype_name(dtype), kAlignment);
  }
}

void check_aligned(std::string_view name, const HeadRows& rows) {
  if (rows) check_aligned(name, rows.data, rows.dtype, {rows.token_stride, rows.head_stride});
}

}  // namespace

CudaLayer cuda_layer(const KvLayerView& view, const KvPool& pool) {
  const KvCacheSpec& spec = pool.spec();
  check_aligned("the cache's k", view.k, view.dtype,
                {view.k_page_stride, view.k_token_stride, view.k_head_stride});
  check_aligned("the cache's v", view.v, view.dtype,
                {view.v_page_stride, view.v_token_stride, view.v_head_stride});
  CudaLayer layer;
  cuda::KeyParams& keys = layer.keys;
  keys.k = view.k;
  keys.v = view.v;
  keys.k_page_stride = view.k_page_stride;
  keys.k_token_stride = view.k_token_stride;
  keys.k_head_stride = view.k_head_stride;
  keys.v_page_stride = view.v_page_stride;
  keys.v_token_stride = view.v_token_stride;
  keys.v_head_stride = view.v_head_stride;
  keys.page_size = view.page_size;
  keys.k_scale = view.k_scale;
  keys.v_scale = view.v_scale;
  const bool per_token = view.scale == KvScale::per_token_head;
  keys.scale_slot_stride = per_token ? spec.kv_heads : 0;
  keys.scale_head_stride = per_token || view.scale == KvScale::per_head ? 1 : 0;

  cuda::KvWriteParams& write = layer.write;
  write.slot_map = pool.device_slot_map();
  write.slot_count = pool_slots(pool);
  write.k_cache = view.k;
  write.v_cache = view.v;
  write.k_page_stride = view.k_page_stride;
  write.k_place_stride = view.k_token_stride;
  write.k_cache_head_stride = view.k_head_stride;
  write.v_page_stride = view.v_page_stride;
  write.v_place_stride = view.v_token_stride;
  write.v_cache_head_stride = view.v_head_stride;
  write.k_scale = view.k_scale;
  write.v_scale = view.v_scale;
  write.scale_kind = scale_kind(view.scale);
  write.page_size = view.page_size;
  write.kv_heads = spec.kv_heads;
  write.head_dim = spec.head_dim;
  write.head_dim_v = spec.head_dim_v;
  return layer;
}

void check_state_alignment(const StateLayerView& view, DType dtype, int32_t layer) {
  check_aligned(fmt::format("layer {} of the state pool: state", layer), view.state, dtype,
                {view.state_slot_stride});
  if (view.drafts == nullptr) return;
  check_aligned(fmt::format("layer {} of the state pool: drafts", layer), view.drafts, DType::f32,
                {});
}

cuda::KeyParams packed_keys(const LayerTensors& tensors, const BatchView& batch) {
  cuda::KeyParams keys{};
  keys.k = tensors.k.data;
  keys.v = tensors.v.data;
  keys.k_token_stride = tensors.k.token_stride;
  keys.k_head_stride = tensors.k.head_stride;
  keys.v_token_stride = tensors.v.token_stride;
  keys.v_head_stride = tensors.v.head_stride;
  keys.kv_indptr = batch.q_indptr.data();
  keys.page_size = 1;
  return keys;
}

void validate_alignment(const LayerTensors& tensors) {
  check_aligned("q", tensors.q);
  check_aligned("mla.q_rope", tensors.mla.q_rope);
  check_aligned("k", tensors.k);
  check_aligned("v", tensors.v);
  check_aligned("mla.latent", tensors.mla.latent);
  check_aligned("mla.k_rope", tensors.mla.k_rope);
  check_aligned("out", tensors.out);
  check_aligned("linear.mixed", tensors.linear.mixed, DType::f32, {});
}

gpu::KernelVariant kv_write_variant(const AttentionSpec& spec, const KvCacheSpec& cache, int sm) {
  const DType written = activation_dtype(spec);
  if (cache.layout == KvLayout::mla_fp8_rows) return cuda::mla_row_write_variant(written, sm);
  return cuda::kv_write_variant(written, cache.dtype, sm);
}

}  // namespace fovea
