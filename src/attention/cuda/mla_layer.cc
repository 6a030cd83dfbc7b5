// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_layer.h"

#include <limits>
#include <utility>

#include "attention/cuda/mla_up_projected.h"
#include "attention/row_views.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int64_t kAlignment = 16;  // bytes

void check_weight(std::string_view name, const void* data, int64_t head_stride) {
  check_argument(reinterpret_cast<uintptr_t>(data) % kAlignment == 0,
                 "{} is at {}, a GPU needs it aligned to {} bytes", name, data, kAlignment);
  const int64_t bytes = head_stride * static_cast<int64_t>(sizeof(uint16_t));
  check_argument(bytes % kAlignment == 0,
                 "{}_head_stride is {} elements, a GPU needs a multiple of {} bytes", name,
                 head_stride, kAlignment);
}

void check_weights(const MlaWeights& weights, const AttentionSpec& spec) {
  if (spec.mla.nope_dim == 0) return;
  check_argument(weights.dtype == spec.q_dtype, "mla.weights are {}, the spec's q_dtype is {}",
                 dtype_name(weights.dtype), dtype_name(spec.q_dtype));
  check_weight("w_uk", weights.w_uk, weights.w_uk_head_stride);
  check_weight("w_uv", weights.w_uv, weights.w_uv_head_stride);
}

// portable/kv_write rotates the tensor that it takes for k, so the rotary key comes first there.
// The kernel for rows of 656 bytes knows both.
bool rotary_key_first(const AttentionSpec& spec, KvLayout layout) {
  return spec.has_rope && layout == KvLayout::mla;
}

cuda::MlaCache cache_format(const KvCacheSpec& cache) {
  if (cache.layout == KvLayout::mla_fp8_rows) return cuda::MlaCache::fp8_rows;
  return is_fp8(cache.dtype) ? cuda::MlaCache::e4m3 : cuda::MlaCache::as_queries;
}

}  // namespace

std::vector<cuda::MlaDecodeSetup> mla_decode_setups(const MlaKernels& kernels,
                                                    const AttentionSpec& spec,
                                                    const KvCacheSpec& cache,
                                                    const DeviceInfo& device) {
  constexpr int32_t kTileRows = 64;
  std::vector<cuda::MlaDecodeSetup> setups;
  // Setups for one token, for as many tokens as fill a tile of one block, and for any number.
  for (const int32_t max_q_len :
       {1, kTileRows / spec.q_heads, std::numeric_limits<int32_t>::max()}) {
    const cuda::MlaDecodeSetup setup = {.family = kernels.absorbed,
                                        .q_heads = spec.q_heads,
                                        .rank = spec.mla.kv_lora_rank,
                                        .rope = spec.mla.rope_dim,
                                        .dtype = spec.q_dtype,
                                        .cache = cache_format(cache),
                                        .scale_per_token = cache.scale == KvScale::per_token_head,
                                        .windowed = spec.window > 0,
                                        .page_size = cache.page_size,
                                        .max_q_len = max_q_len,
                                        .batch_invariant = spec.batch_invariant,
                                        .sm = device.sm,
                                        .multiprocessors = device.cores};
    const bool larger = setups.empty() ||
                        cuda::MlaDecode::row_tile(setup) > cuda::MlaDecode::row_tile(setups.back());
    if (larger) setups.push_back(setup);
  }
  return setups;
}

cuda::HeadGemmSetup mla_weights_setup(cuda::WeightOrder order, const MlaKernels& kernels,
                                      const AttentionSpec& spec, const DeviceInfo& device) {
  return {.order = order,
          .dtype = spec.q_dtype,
          .sm = device.sm,
          .multiprocessors = device.cores,
          .hopper = kernels.hopper_projections && !spec.batch_invariant};
}

std::vector<gpu::KernelVariant> mla_variants(const MlaKernels& kernels, const AttentionSpec& spec,
                                             const KvCacheSpec& cache, const DeviceInfo& device,
                                             int32_t heads) {
  std::vector<gpu::KernelVariant> needed;
  const auto add = [&](std::vector<gpu::KernelVariant> variants) {
    needed.insert(needed.end(), variants.begin(), variants.end());
  };
  add({kv_write_variant(spec, cache, device.sm)});
  AttentionSpec some = spec;
  some.q_heads = heads;
  for (const AttentionSpec& own : {spec, some}) {
    for (const cuda::MlaDecodeSetup& setup : mla_decode_setups(kernels, own, cache, device)) {
      add(cuda::MlaDecode::variants(setup));
    }
    if (heads == spec.q_heads) break;
  }
  if (spec.mla.nope_dim > 0) {
    for (const cuda::WeightOrder order : {cuda::WeightOrder::kn, cuda::WeightOrder::nk}) {
      add(cuda::HeadGemm::variants(mla_weights_setup(order, kernels, spec, device)));
    }
  }
  if (can_up_project(spec)) add(CudaUpProjectedMla::variants(kernels, spec, cache.dtype, device));
  return needed;
}

cuda::KvWriteParams mla_write(const KvLayerView& view, const KvPool& pool,
                              const AttentionSpec& spec) {
  cuda::KvWriteParams write = cuda_layer(view, pool).write;
  write.v_cache = view.k + spec.mla.kv_lora_rank * static_cast<int64_t>(dtype_bytes(view.dtype));
  write.v_page_stride = view.k_page_stride;
  write.v_place_stride = view.k_token_stride;
  write.head_dim = spec.mla.kv_lora_rank;
  write.head_dim_v = spec.mla.rope_dim;
  if (rotary_key_first(spec, view.layout)) {
    std::swap(write.k_cache, write.v_cache);
    std::swap(write.head_dim, write.head_dim_v);
  }
  return write;
}

LayerTensors mla_written(const LayerTensors& tensors, const AttentionSpec& spec, KvLayout layout) {
  LayerTensors written = tensors;
  written.q = rotary_queries(tensors, spec);
  written.k = tensors.mla.latent;
  written.v = tensors.mla.k_rope;
  if (rotary_key_first(spec, layout)) std::swap(written.k, written.v);
  return written;
}

cuda::MlaDecodeTensors mla_cache(const KvLayerView& view, const AttentionSpec& spec) {
  cuda::MlaDecodeTensors tensors;
  tensors.cache = view.k;
  tensors.pages = view.slots / view.page_size;
  tensors.page_stride = view.k_page_stride;
  tensors.token_stride = view.k_token_stride;
  tensors.cache_scale = view.k_scale;
  tensors.scale = softmax_scale(spec);
  return tensors;
}

void validate_mla_layer(const LayerTensors& tensors, const AttentionSpec& spec) {
  validate_alignment(tensors);
  if (!tensors.q) return;
  check_argument(!tensors.mla.q_rope || spec.mla.rope_dim > 0,
                 "mla.q_rope is given, but the spec's rope_dim is 0");
  check_weights(tensors.mla.weights, spec);
}

}  // namespace fovea
