// SPDX-License-Identifier: Apache-2.0
#include "model/layers.h"

#include "core/check.h"

namespace fovea {

using kernels::HeadView;

std::byte* Arena::take(int64_t count) {
  constexpr size_t kAlignment = 64;
  const size_t begin = used_;
  used_ += (static_cast<size_t>(count) * 4 + kAlignment - 1) / kAlignment * kAlignment;
  if (memory_.empty()) return nullptr;
  check_argument(used_ <= memory_.size(), "a block takes {} bytes of scratch, reserved are {}",
                 used_, memory_.size());
  return memory_.data() + begin;
}

void Norm::apply(HeadView x, HeadView out, int64_t rows, int32_t heads, ThreadPool& threads) const {
  kernels::RmsNormParams params;
  params.x = x;
  params.out = out;
  params.weight = weight.data();
  params.weight_plus_one = plus_one;
  params.epsilon = epsilon;
  params.rows = rows;
  params.heads = heads;
  params.dim = static_cast<int32_t>(weight.size());
  kernels::rms_norm(params, threads);
}

void Rotary::apply(const Pass& pass, HeadView x, int32_t heads) const {
  kernels::RopeParams params;
  params.x = x;
  params.table = table.get();
  params.layout = layout;
  params.positions = pass.positions;
  params.rows = pass.rows;
  params.heads = heads;
  kernels::rope(params, *pass.threads);
}

SelfAttention::Buffers SelfAttention::buffers(Arena& arena, int64_t rows) const {
  const int64_t out_width = int64_t{parts_.spec.q_heads} * parts_.spec.head_dim_v;
  return {.q = arena.floats(rows * parts_.q.n),
          .k = arena.floats(rows * parts_.k.n),
          .v = arena.floats(rows * parts_.v.n),
          .out = arena.floats(rows * out_width)};
}

void SelfAttention::prepare(Pass& pass, HeadView q, HeadView k) const {
  const AttentionSpec& spec = parts_.spec;
  if (parts_.q_norm) parts_.q_norm.apply(q, q, pass.rows, spec.q_heads, *pass.threads);
  if (parts_.k_norm) parts_.k_norm.apply(k, k, pass.rows, spec.kv_heads, *pass.threads);
  if (parts_.rotary.table != nullptr) {
    parts_.rotary.apply(pass, q, spec.q_heads);
    parts_.rotary.apply(pass, k, spec.kv_heads);
  }
}

void SelfAttention::forward(Pass& pass, float* x, float* out) const {
  const AttentionSpec& spec = parts_.spec;
  const Buffers scratch = buffers(pass.arena, pass.rows);
  const Rows input{x, parts_.q.k};
  parts_.q.apply(input, {scratch.q, parts_.q.n}, pass.rows, *pass.threads);
  parts_.k.apply(input, {scratch.k, parts_.k.n}, pass.rows, *pass.threads);
  parts_.v.apply(input, {scratch.v, parts_.v.n}, pass.rows, *pass.threads);

  const int64_t q_head_stride = parts_.has_output_gate ? 2 * spec.head_dim : spec.head_dim;
  const HeadView q{scratch.q, parts_.q.n, q_head_stride};
  const HeadView k{scratch.k, parts_.k.n, spec.head_dim};
  const HeadView v{scratch.v, parts_.v.n, spec.head_dim_v};
  const HeadView mixed{scratch.out, int64_t{spec.q_heads} * spec.head_dim_v, spec.head_dim_v};
  prepare(pass, q, k);

  LayerTensors tensors;
  tensors.layer = parts_.slot.layer;
  tensors.q = as_rows(q);
  tensors.k = as_rows(k);
  tensors.v = as_rows(v);
  tensors.out = as_rows(mixed);
  tensors.sinks = parts_.sinks.empty() ? nullptr : parts_.sinks.data();
  pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors);

  if (parts_.has_output_gate) {
    kernels::SigmoidGateParams params;
    params.x = mixed;
    params.gate = {scratch.q + spec.head_dim, q.row_stride, q.head_stride};
    params.rows = pass.rows;
    params.heads = spec.q_heads;
    params.dim = params.gate_dim = spec.head_dim_v;
    kernels::sigmoid_gate(params, *pass.threads);
  }
  parts_.o.apply({scratch.out, parts_.o.k}, {out, parts_.o.n}, pass.rows, *pass.threads);
}

void MlpParts::apply(Rows x, Rows out, int64_t rows, float* hidden, ThreadPool& threads) const {
  const int64_t stride = 2 * static_cast<int64_t>(width());
  gate.apply(x, {hidden, stride}, rows, threads);
  if (up) up.apply(x, {hidden + width(), stride}, rows, threads);

  kernels::GatedActivationParams params;
  params.activation = activation;
  params.gate = hidden;
  params.up = hidden + (alternates ? 1 : width());
  params.in_row_stride = stride;
  params.in_step = alternates ? 2 : 1;
  params.out = alternates ? hidden + rows * stride : hidden;
  params.out_row_stride = alternates ? width() : stride;
  params.rows = rows;
  params.dim = width();
  kernels::gated_activation(params, threads);
  down.apply({params.out, params.out_row_stride}, out, rows, threads);
}

void Mlp::take_scratch(Arena& arena, int64_t rows) const {
  arena.floats(rows * parts_.hidden_floats());
}

void Mlp::forward(Pass& pass, float* x, float* out) const {
  float* hidden = pass.arena.floats(pass.rows * parts_.hidden_floats());
  parts_.apply({x, parts_.gate.k}, {out, parts_.down.n}, pass.rows, hidden, *pass.threads);
}

}  // namespace fovea
