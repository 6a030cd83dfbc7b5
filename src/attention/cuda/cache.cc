// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/cache.h"

#include <algorithm>
#include <cstdint>

#include "attention/validate/batch.h"
#include "attention/validate/layer.h"
#include "core/rounding.h"

namespace fovea {

namespace cuda = kernels::cuda;

CudaCache::CudaCache(const AttentionSpec& spec, const KvPool& pool, int sm, gpu::KernelStore& store)
    : spec_(spec), pool_(&pool) {
  kv_write_ = cuda::KvWrite(kv_write_variant(spec, pool.spec(), sm), store);
}

CudaPages CudaCache::carve(WorkspaceCarver& workspace, const AttentionSpec& spec, int32_t page_size,
                           const BatchLimits& limits) {
  const int64_t keys =
      spec.scope == AttentionScope::cross ? limits.max_encoder_len : limits.max_kv_len;
  CudaPages pages;
  pages.stride = ceil_div(round_up(keys, cuda::kTableKeys), page_size);
  pages.table = workspace.take<int32_t>(limits.max_requests * pages.stride);
  return pages;
}

cuda::TableWriteParams CudaCache::page_table(const BatchView& batch, const int32_t* kv_lens,
                                             const CudaPages& pages) const {
  const int32_t page_size = pool_->spec().page_size;
  const TokenTable& given = key_table(batch, spec_.scope);
  cuda::TableWriteParams table{};
  table.given = given.entries;
  table.given_stride = given.stride;
  table.given_end =
      static_cast<int32_t>(std::min<int64_t>(pool_slots(*pool_) / given.entry_tokens, INT32_MAX));
  table.gives_pages = given.entry_tokens > 1;
  table.request_rows = batch.request_rows.data();
  table.kv_lens = kv_lens;
  table.slot_map = pool_->device_slot_map();
  table.page_table = pages.table;
  table.page_table_stride = pages.stride;
  table.requests = batch.requests;
  table.page_size = page_size;
  return table;
}

void CudaCache::store(const LayerTensors& tensors, cuda::KvWriteParams layer,
                      const BatchView& batch, gpu::Launcher launcher) const {
  layer.k = stores(tensors) ? tensors.k.data : nullptr;
  layer.v = tensors.v.data;
  layer.k_token_stride = tensors.k.token_stride;
  layer.k_head_stride = tensors.k.head_stride;
  layer.v_token_stride = tensors.v.token_stride;
  layer.v_head_stride = tensors.v.head_stride;
  layer.slots = batch.out_slots.data();
  layer.q_indptr = batch.q_indptr.data();
  layer.requests = batch.requests;
  if (spec_.has_rope) {
    const RotaryTensors& rotary = tensors.rotary;
    layer.rotary = {rotary.cos, rotary.sin, rotary.max_positions, rotary.rotary_dim,
                    rotary.interleaved};
    layer.positions = rotary.positions;
    layer.q = tensors.q.data;
    layer.q_token_stride = tensors.q.token_stride;
    layer.q_head_stride = tensors.q.head_stride;
    layer.q_heads = tensors.q ? spec_.q_heads : 0;
  }
  const auto norm = [](const HeadNorm& given) -> cuda::NormWeights {
    return {given.weight, given.epsilon, given.plus_one ? 1.0f : 0.0f};
  };
  kv_write_.run({layer, norm(tensors.rotary.q_norm), norm(tensors.rotary.k_norm), batch.tokens},
                launcher);
}

}  // namespace fovea
