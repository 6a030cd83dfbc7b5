// SPDX-License-Identifier: Apache-2.0
#include "attention/host/mha.h"

#include "attention/batch_mask.h"
#include "attention/host/dual_chunk.h"
#include "attention/host/pages.h"
#include "attention/host/prefixes.h"
#include "attention/validate/layer.h"
#include "attention/validate/spec.h"

namespace fovea {
namespace {

struct MhaBuffers {
  PageTable pages;             // for cached keys
  int32_t* kv_lens = nullptr;  // packed scopes: q_len of each request
  HeadRows rotated_k;          // [max_tokens, kv_heads, head_dim], with has_rope
  std::span<std::byte> schedule;
  HostPrefixes prefixes;
  HostDualChunk dual_chunk;  // replaces the schedule
};

HostKernels::Shape kernel_shape(const HostShape& shape) {
  return shape.attention(shape.spec.kv_heads, shape.spec.head_dim, shape.spec.head_dim_v);
}

// Returns the largest number of keys of a request.
int32_t max_keys(const AttentionSpec& spec, const BatchLimits& limits) {
  if (is_packed(spec.scope)) return limits.max_q_len;
  if (spec.scope == AttentionScope::cross) return limits.max_encoder_len;
  return limits.max_kv_len;
}

MhaBuffers carve_mha(WorkspaceCarver& workspace, const HostShape& shape,
                     const BatchLimits& limits) {
  BatchLimits key_limits = limits;
  key_limits.max_kv_len = max_keys(shape.spec, limits);
  MhaBuffers buffers;
  if (uses_kv_cache(shape.spec)) {
    buffers.pages = carve_page_table(workspace, key_limits, shape.cache.page_size);
  } else {
    buffers.kv_lens = workspace.take<int32_t>(limits.max_requests);
  }
  if (const AttentionSpec& spec = shape.spec; spec.has_rope) {
    buffers.rotated_k =
        carve_rows(workspace, spec.q_dtype, limits.max_tokens, spec.kv_heads, spec.head_dim);
  }
  if (shape.spec.dual_chunk) {
    buffers.dual_chunk.carve(workspace, shape, kernel_shape(shape), key_limits);
    return buffers;
  }
  buffers.schedule = workspace.take_bytes(
      shape.kernels->attention_workspace_bytes(kernel_shape(shape), key_limits));
  buffers.prefixes.carve(workspace, shape, kernel_shape(shape), limits);
  return buffers;
}

class HostMha final : public HostBackend {
 public:
  HostMha(const HostKernels& kernels, const BackendContext& context)
      : HostBackend(kernels, context), kernel_shape_(kernel_shape(shape())) {}

 private:
  size_t count_bytes(const BatchLimits& limits) const override {
    return host_mha_workspace_bytes(shape(), limits);
  }

  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override {
    buffers_ = carve_mha(workspace, shape(), limits);
  }

  void plan_batch(const BatchView& batch) override {
    params_ = {};
    params_.requests = batch.requests;
    params_.q_indptr = batch.q_indptr.data();
    params_.q_heads = spec().q_heads;
    params_.kv_heads = spec().kv_heads;
    params_.head_dim = spec().head_dim;
    params_.head_dim_v = spec().head_dim_v;
    params_.mask = batch_mask(batch, spec());
    params_.scale = softmax_scale(spec());
    params_.logit_cap = spec().scores.logit_cap;
    if (uses_kv_cache(spec())) {
      plan_cached_keys(batch);
    } else {
      plan_packed_keys(batch);
    }
    if (spec().dual_chunk) return buffers_.dual_chunk.plan(params_);
    cascades_ = buffers_.prefixes.plan(batch, params_, shape().cache.page_size);
    if (cascades_) params_.mask.first_keys = buffers_.prefixes.first_keys();
    schedule_ = kernels().plan_attention(kernel_shape_, params_, buffers_.schedule);
  }

  void plan_cached_keys(const BatchView& batch) {
    const bool cross = spec().scope == AttentionScope::cross;
    params_.kv_lens = (cross ? batch.cross.lens : batch.kv_lens).data();
    build_batch_pages(batch, spec(), *pool(), buffers_.pages);
    params_.keys.page_table = buffers_.pages.table;
    params_.keys.page_table_stride = buffers_.pages.stride;
    params_.keys.cache.page_size = shape().cache.page_size;
  }

  void plan_packed_keys(const BatchView& batch) {
    for (int32_t request = 0; request < batch.requests; ++request) {
      buffers_.kv_lens[request] = batch.q_indptr[request + 1] - batch.q_indptr[request];
    }
    params_.kv_lens = buffers_.kv_lens;
    params_.keys.kv_indptr = batch.q_indptr.data();
  }

  // Rotates q in place; returns the layer with k rotated in the workspace.
  LayerTensors rotated(LayerTensors layer) {
    if (spec().dual_chunk) {
      return buffers_.dual_chunk.rotated(layer, params_, buffers_.rotated_k, threads());
    }
    const auto rotate = [&](const HeadRows& from, const HeadRows& to, int32_t heads,
                            const HeadNorm& norm) {
      kernels::rotate_heads({layer.rotary, from, to, batch().tokens, heads, spec().head_dim, norm},
                            threads());
    };
    if (layer.q) rotate(layer.q, layer.q, spec().q_heads, layer.rotary.q_norm);
    if (stores(layer)) {
      rotate(layer.k, buffers_.rotated_k, spec().kv_heads, layer.rotary.k_norm);
      layer.k = buffers_.rotated_k;
    }
    return layer;
  }

  void run_layer(const LayerTensors& given) override {
    const LayerTensors layer = spec().has_rope ? rotated(given) : given;
    if (uses_kv_cache(spec())) {
      params_.keys.cache = pool()->layer(layer.layer);
      store(layer, params_.keys.cache);
    } else {
      params_.keys.k = layer.k;
      params_.keys.v = layer.v;
    }
    if (!layer.q) return;
    params_.q = layer.q;
    params_.q_scale = layer.q_scale;
    params_.out = layer.out;
    params_.lse = layer.lse.data;
    params_.sinks = layer.scores.sinks;
    params_.alibi_slopes = layer.scores.alibi_slopes;
    if (spec().dual_chunk) {
      buffers_.dual_chunk.run(params_, layer.dual_chunk.q_succ, layer.dual_chunk.q_inter,
                              threads());
    } else if (cascades_) {
      buffers_.prefixes.run(params_, schedule_, threads());
    } else {
      kernels().attention(kernel_shape_, params_, schedule_, threads());
    }
  }

  HostKernels::Shape kernel_shape_;
  MhaBuffers buffers_;
  kernels::AttentionParams params_;  // the planned batch; each layer adds its tensors
  HostKernels::Schedule schedule_;
  bool cascades_ = false;  // the planned batch has shared prefixes
};

}  // namespace

size_t host_mha_workspace_bytes(const HostShape& shape, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve_mha(counter, shape, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_host_mha(const HostKernels& kernels,
                                                const BackendContext& context) {
  return std::make_unique<HostMha>(kernels, context);
}

}  // namespace fovea
