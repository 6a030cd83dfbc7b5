// SPDX-License-Identifier: Apache-2.0
#include "attention/host/mla_absorbed.h"

#include <algorithm>

#include "attention/host/row_copy.h"
#include "attention/mla_forms.h"
#include "attention/row_views.h"
#include "attention/validate/spec.h"

namespace fovea {
namespace {

HostKernels::Shape kernel_shape(const HostShape& shape) {
  return shape.attention(1, shape.spec.mla.row_dim(), shape.spec.mla.kv_lora_rank);
}

}  // namespace

void HostAbsorbedMla::carve(WorkspaceCarver& workspace, const HostShape& shape,
                            const BatchLimits& limits, int32_t heads) {
  shape_ = shape;
  const AttentionSpec& spec = shape.spec;
  if (has_weights()) {
    const int64_t rows = int64_t{limits.max_tokens} * heads;
    queries_ = workspace.take<float>(rows * std::max(spec.mla.row_dim(), spec.mla.v_dim));
    latents_ = workspace.take<float>(
        rows * std::max(spec.mla.kv_lora_rank, spec.mla.nope_dim + spec.mla.rope_dim));
    if (spec.needs_lse) lse_ = workspace.take<float>(rows);
  }
  const HostShape some = with_heads(shape, heads);
  schedule_memory_ = workspace.take_bytes(
      std::max(shape.kernels->attention_workspace_bytes(kernel_shape(shape), limits),
               shape.kernels->attention_workspace_bytes(kernel_shape(some), limits)));
}

void HostAbsorbedMla::plan(const HostShape& shape, const BatchView& batch,
                           const AbsorbedBatch& absorbed, const kernels::AttentionMask& mask) {
  shape_ = shape;
  batch_ = batch;
  absorbed_ = absorbed;
  if (absorbed.tokens == 0) return;
  const AttentionSpec& spec = shape.spec;
  params_ = {};
  params_.requests = static_cast<int32_t>(absorbed.requests.size());
  params_.q_indptr = absorbed.q_indptr;
  params_.kv_lens = absorbed.kv_lens;
  params_.q_heads = spec.q_heads;
  params_.kv_heads = 1;
  params_.head_dim = spec.mla.row_dim();
  params_.head_dim_v = spec.mla.kv_lora_rank;
  params_.q_split_dim = spec.mla.kv_lora_rank;
  params_.mask = mask;
  // Requests leave the pass only under the plain causal mask, which knows no positions.
  if (!absorbed.whole_batch) params_.mask.positions = nullptr;
  params_.scale = softmax_scale(spec);
  params_.logit_cap = spec.scores.logit_cap;
  params_.keys.page_table = absorbed.pages.table;
  params_.keys.page_table_stride = absorbed.pages.stride;
  params_.keys.cache.page_size = shape.cache.page_size;
  schedule_ = shape.kernels->plan_attention(kernel_shape(shape), params_, schedule_memory_);
}

void HostAbsorbedMla::run(const LayerTensors& layer, const KvLayerView& cache,
                          ThreadPool& threads) {
  if (absorbed_.tokens == 0) return;
  const AttentionSpec& spec = shape_.spec;
  params_.keys.cache = cache;
  params_.sinks = layer.scores.sinks;
  params_.alibi_slopes = layer.scores.alibi_slopes;
  params_.lse = absorbed_.whole_batch || !layer.lse ? layer.lse.data : lse_;
  if (has_weights()) {
    absorb(layer, queries(layer, threads), threads);
    params_.q = dense_rows(queries_, DType::f32, spec.q_heads, spec.mla.row_dim());
    params_.q_rope = {};
    params_.out = dense_rows(latents_, DType::f32, spec.q_heads, spec.mla.kv_lora_rank);
  } else {
    params_.q = layer.q;
    params_.q_rope = layer.mla.q_rope;
    params_.out = layer.out;
  }
  shape_.kernels->attention(kernel_shape(shape_), params_, schedule_, threads);
  if (has_weights()) project_values(layer, threads);
  if (!absorbed_.whole_batch && layer.lse) scatter_lse(layer.lse.data);
}

// Returns the pass's queries as f32 [tokens, q_heads, nope + rope]: the layer's own if they are.
HeadRows HostAbsorbedMla::queries(const LayerTensors& layer, ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  if (absorbed_.whole_batch && layer.q.dtype == DType::f32 && !layer.mla.q_rope) return layer.q;
  const int32_t width = spec.mla.nope_dim + spec.mla.rope_dim;
  const HeadRows dense = dense_rows(latents_, DType::f32, spec.q_heads, width);
  for (size_t i = 0; i < absorbed_.requests.size(); ++i) {
    const int64_t from = batch_.q_indptr[absorbed_.requests[i]];
    const int64_t to = absorbed_.q_indptr[i];
    const int64_t tokens = absorbed_.q_indptr[i + 1] - to;
    const int32_t front = layer.mla.q_rope ? spec.mla.nope_dim : width;
    copy_rows({rows_from(layer.q, from), rows_from(dense, to), tokens, spec.q_heads, front},
              threads);
    if (!layer.mla.q_rope) continue;
    copy_rows({rows_from(layer.mla.q_rope, from), rows_from(dense, to, front), tokens, spec.q_heads,
               spec.mla.rope_dim},
              threads);
  }
  return dense;
}

// queries_ = [q_nope * W_UK | q_rope] per head.
void HostAbsorbedMla::absorb(const LayerTensors& layer, const HeadRows& q, ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  const MlaWeights weights = with_head_strides(layer.mla.weights, spec);
  kernels::GemmParams gemm;
  gemm.x_stride = q.token_stride;
  gemm.weight_dtype = weights.dtype;
  gemm.weight_stride = spec.mla.kv_lora_rank;
  gemm.weight_is_kn = true;
  gemm.out_stride = int64_t{spec.q_heads} * spec.mla.row_dim();
  gemm.rows = absorbed_.tokens;
  gemm.n = spec.mla.kv_lora_rank;
  gemm.k = spec.mla.nope_dim;
  for (int32_t head = 0; head < spec.q_heads; ++head) {
    gemm.x = reinterpret_cast<const float*>(row_address(q, 0, head));
    gemm.weight = from_head(weights, head).w_uk;
    gemm.out = queries_ + int64_t{head} * spec.mla.row_dim();
    shape_.kernels->gemm(gemm, threads);
  }
  const HeadRows absorbed = dense_rows(queries_, DType::f32, spec.q_heads, spec.mla.row_dim());
  copy_rows({rows_from(q, 0, spec.mla.nope_dim), rows_from(absorbed, 0, spec.mla.kv_lora_rank),
             absorbed_.tokens, spec.q_heads, spec.mla.rope_dim},
            threads);
}

// out = latents_ * W_UV^T per head.
void HostAbsorbedMla::project_values(const LayerTensors& layer, ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  const MlaWeights weights = with_head_strides(layer.mla.weights, spec);
  const bool direct = absorbed_.whole_batch && layer.out.dtype == DType::f32;
  const HeadRows out =
      direct ? layer.out : dense_rows(queries_, DType::f32, spec.q_heads, spec.mla.v_dim);
  kernels::GemmParams gemm;
  gemm.x_stride = int64_t{spec.q_heads} * spec.mla.kv_lora_rank;
  gemm.weight_dtype = weights.dtype;
  gemm.weight_stride = spec.mla.kv_lora_rank;
  gemm.out_stride = out.token_stride;
  gemm.rows = absorbed_.tokens;
  gemm.n = spec.mla.v_dim;
  gemm.k = spec.mla.kv_lora_rank;
  for (int32_t head = 0; head < spec.q_heads; ++head) {
    gemm.x = latents_ + int64_t{head} * spec.mla.kv_lora_rank;
    gemm.weight = from_head(weights, head).w_uv;
    gemm.out = reinterpret_cast<float*>(row_address(out, 0, head));
    shape_.kernels->gemm(gemm, threads);
  }
  if (!direct) scatter(out, layer, threads);
}

void HostAbsorbedMla::scatter(const HeadRows& from, const LayerTensors& layer,
                              ThreadPool& threads) {
  for (size_t i = 0; i < absorbed_.requests.size(); ++i) {
    const int64_t row = absorbed_.q_indptr[i];
    copy_rows({rows_from(from, row), rows_from(layer.out, batch_.q_indptr[absorbed_.requests[i]]),
               absorbed_.q_indptr[i + 1] - row, shape_.spec.q_heads, shape_.spec.mla.v_dim},
              threads);
  }
}

void HostAbsorbedMla::scatter_lse(float* lse) {
  const int64_t heads = shape_.spec.q_heads;
  for (size_t i = 0; i < absorbed_.requests.size(); ++i) {
    std::copy(lse_ + absorbed_.q_indptr[i] * heads, lse_ + absorbed_.q_indptr[i + 1] * heads,
              lse + batch_.q_indptr[absorbed_.requests[i]] * heads);
  }
}

}  // namespace fovea
