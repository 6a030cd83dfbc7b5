// SPDX-License-Identifier: Apache-2.0
#include "attention/host/mla_up_projected.h"

#include <algorithm>
#include <limits>

#include "attention/host/row_copy.h"
#include "attention/mla_forms.h"
#include "attention/row_views.h"
#include "attention/validate/spec.h"

namespace fovea {
namespace {

HostKernels::Shape kernel_shape(const HostShape& shape) {
  const AttentionSpec& spec = shape.spec;
  return shape.attention(spec.q_heads, spec.mla.nope_dim + spec.mla.rope_dim, spec.mla.v_dim);
}

}  // namespace

void HostUpProjectedMla::carve(WorkspaceCarver& workspace, const HostShape& shape,
                               const BatchLimits& limits, int32_t chunk_rows, int32_t heads) {
  shape_ = shape;
  const AttentionSpec& spec = shape.spec;
  const int64_t qk_dim = spec.mla.nope_dim + spec.mla.rope_dim;
  chunk_rows_ = std::min(chunk_rows, limits.max_kv_len);
  const int32_t max_queries = std::min(limits.max_q_len, limits.max_tokens);
  query_heads_ = std::min(int64_t{max_queries} * spec.q_heads, int64_t{limits.max_tokens} * heads);
  latents_ = workspace.take<float>(int64_t{chunk_rows_} * spec.mla.row_dim());
  k_ = workspace.take<float>(chunk_rows_ * spec.q_heads * qk_dim);
  v_ = workspace.take<float>(int64_t{chunk_rows_} * spec.q_heads * spec.mla.v_dim);
  if (spec.q_dtype != DType::f32) {
    queries_ = workspace.take<float>(query_heads_ * qk_dim);
  }
  out_ = workspace.take<float>(2 * query_heads_ * spec.mla.v_dim);
  lse_ = workspace.take<float>(2 * query_heads_);
  BatchLimits part = limits;
  part.max_requests = 1;
  part.max_tokens = part.max_q_len = max_queries;
  part.max_kv_len = chunk_rows_;
  const HostShape some = with_heads(shape, heads);
  schedule_memory_ = workspace.take_bytes(
      std::max(shape.kernels->attention_workspace_bytes(kernel_shape(shape), part),
               shape.kernels->attention_workspace_bytes(kernel_shape(some), part)));
}

void HostUpProjectedMla::run(const BatchView& batch, int32_t request, const LayerTensors& layer,
                             const KvLayerView& cache, ThreadPool& threads) {
  start(batch, request, layer, threads);
  const int32_t kv_len = batch.kv_lens[request];
  const int32_t cached = kv_len - q_len_;
  const TokenTable& table = batch.table;
  const int32_t row = batch.request_rows[request];
  for (int32_t begin = 0; begin < kv_len; begin += chunk_rows_) {
    const int32_t end = std::min(kv_len, begin + chunk_rows_);
    gather_latents({cache, table, row, begin, end - begin, shape_.spec.mla.row_dim(), latents_},
                   threads);
    project(layer.mla.weights, end - begin, threads);
    // Queries inside the chunk see a part of it, later queries see all, earlier queries nothing.
    const int32_t inside = std::max(begin - cached, 0);
    const int32_t after = std::max(end - cached, 0);
    attend({inside, after, true}, end - begin, threads);
    attend({after, q_len_, false}, end - begin, threads);
  }
  finish(layer, threads);
}

void HostUpProjectedMla::start(const BatchView& batch, int32_t request, const LayerTensors& layer,
                               ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  first_row_ = batch.q_indptr[request];
  q_len_ = batch.q_indptr[request + 1] - batch.q_indptr[request];
  q_ = rows_from(layer.q, first_row_);
  q_rope_ = layer.mla.q_rope ? rows_from(layer.mla.q_rope, first_row_) : HeadRows{};
  if (spec.q_dtype != DType::f32) {
    const int32_t width = spec.mla.nope_dim + spec.mla.rope_dim;
    const int32_t front = q_rope_ ? spec.mla.nope_dim : width;
    const HeadRows dense = dense_rows(queries_, DType::f32, spec.q_heads, width);
    copy_rows({q_, dense, q_len_, spec.q_heads, front}, threads);
    if (q_rope_) {
      copy_rows({q_rope_, rows_from(dense, 0, front), q_len_, spec.q_heads, spec.mla.rope_dim},
                threads);
    }
    q_ = dense;
    q_rope_ = {};
  }
  const int64_t rows = int64_t{q_len_} * spec.q_heads;
  std::fill_n(out_, rows * spec.mla.v_dim, 0.0f);
  std::fill_n(lse_, rows, -std::numeric_limits<float>::infinity());
}

// k_ = [W_UK * latent | rotary key], v_ = W_UV * latent, per head.
void HostUpProjectedMla::project(const MlaWeights& given, int64_t rows, ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  const MlaWeights weights = with_head_strides(given, spec);
  const int32_t qk_dim = spec.mla.nope_dim + spec.mla.rope_dim;
  kernels::GemmParams gemm;
  gemm.x = latents_;
  gemm.x_stride = spec.mla.row_dim();
  gemm.weight_dtype = weights.dtype;
  gemm.weight_stride = spec.mla.kv_lora_rank;
  gemm.rows = static_cast<int32_t>(rows);
  gemm.k = spec.mla.kv_lora_rank;
  for (int32_t head = 0; head < spec.q_heads; ++head) {
    const MlaWeights own = from_head(weights, head);
    gemm.n = spec.mla.nope_dim;
    gemm.weight = own.w_uk;
    gemm.out = k_ + int64_t{head} * qk_dim;
    gemm.out_stride = int64_t{spec.q_heads} * qk_dim;
    shape_.kernels->gemm(gemm, threads);
    gemm.n = spec.mla.v_dim;
    gemm.weight = own.w_uv;
    gemm.out = v_ + int64_t{head} * spec.mla.v_dim;
    gemm.out_stride = int64_t{spec.q_heads} * spec.mla.v_dim;
    shape_.kernels->gemm(gemm, threads);
  }
  // All heads share one rotary key: a head stride of 0 repeats it.
  const HeadRows rope = {latents_ + spec.mla.kv_lora_rank, DType::f32, spec.mla.row_dim(), 0};
  const HeadRows k = dense_rows(k_, DType::f32, spec.q_heads, qk_dim);
  copy_rows({rope, rows_from(k, 0, spec.mla.nope_dim), rows, spec.q_heads, spec.mla.rope_dim},
            threads);
}

void HostUpProjectedMla::attend(const Part& part, int32_t keys, ThreadPool& threads) {
  if (part.begin >= part.end) return;
  const AttentionSpec& spec = shape_.spec;
  const int64_t heads = spec.q_heads;
  const int64_t out_part = query_heads_ * spec.mla.v_dim, lse_part = query_heads_;
  float* out = out_ + part.begin * heads * spec.mla.v_dim;
  float* lse = lse_ + part.begin * heads;
  q_indptr_ = {0, part.end - part.begin};
  kv_indptr_ = {0, keys};
  kernels::AttentionParams params;
  params.requests = 1;
  params.q_indptr = q_indptr_.data();
  params.kv_lens = &kv_indptr_[1];
  params.keys.kv_indptr = kv_indptr_.data();
  params.keys.k = dense_rows(k_, DType::f32, heads, spec.mla.nope_dim + spec.mla.rope_dim);
  params.keys.v = dense_rows(v_, DType::f32, heads, spec.mla.v_dim);
  params.q = rows_from(q_, part.begin);
  if (q_rope_) params.q_rope = rows_from(q_rope_, part.begin);
  params.q_split_dim = spec.mla.nope_dim;
  params.out = dense_rows(out + out_part, DType::f32, heads, spec.mla.v_dim);
  params.lse = lse + lse_part;
  params.q_heads = params.kv_heads = spec.q_heads;
  params.head_dim = spec.mla.nope_dim + spec.mla.rope_dim;
  params.head_dim_v = spec.mla.v_dim;
  params.mask.causal = part.causal;
  params.scale = softmax_scale(spec);
  params.logit_cap = spec.scores.logit_cap;
  // The parts of a pass share these buffers, so each is planned when it runs.
  const HostKernels::Shape shape = kernel_shape(shape_);
  const HostKernels::Schedule schedule =
      shape_.kernels->plan_attention(shape, params, schedule_memory_);
  shape_.kernels->attention(shape, params, schedule, threads);

  kernels::MergeStatesParams merge;
  merge.o = merge.out = out;
  merge.lse = merge.out_lse = lse;
  merge.o_part_stride = out_part;
  merge.lse_part_stride = lse_part;
  merge.parts = 2;
  merge.rows = part.end - part.begin;
  merge.heads = spec.q_heads;
  merge.dim = spec.mla.v_dim;
  shape_.kernels->merge_states(merge, threads);
}

void HostUpProjectedMla::finish(const LayerTensors& layer, ThreadPool& threads) {
  const AttentionSpec& spec = shape_.spec;
  const HeadRows out = dense_rows(out_, DType::f32, spec.q_heads, spec.mla.v_dim);
  copy_rows({out, rows_from(layer.out, first_row_), q_len_, spec.q_heads, spec.mla.v_dim}, threads);
  if (!layer.lse) return;
  std::copy_n(lse_, int64_t{q_len_} * spec.q_heads, layer.lse.data + first_row_ * spec.q_heads);
}

}  // namespace fovea
