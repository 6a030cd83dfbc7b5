// SPDX-License-Identifier: Apache-2.0
#include "model/layers.h"

#include <array>

#include "core/check.h"
#include "core/rounding.h"

namespace fovea {

std::byte* Arena::bytes(int64_t count) {
  constexpr size_t kAlignment = 256;
  const size_t begin = used_;
  used_ += round_up(static_cast<size_t>(count), kAlignment);
  if (memory_.empty()) return nullptr;
  check_argument(used_ <= memory_.size(), "a block takes {} bytes of scratch, reserved are {}",
                 used_, memory_.size());
  return memory_.data() + begin;
}

Rows Arena::rows(int64_t count, int64_t width) {
  return {bytes(count * width * static_cast<int64_t>(dtype_bytes(activation_))), width,
          activation_};
}

Rows Arena::float_rows(int64_t count, int64_t width) {
  return {floats(count * width), width, DType::f32};
}

void norm_over_ranks(ModelDevice& device, std::span<const DividedNorm> steps) {
  int64_t count = 0;
  for (const DividedNorm& step : steps) {
    device.divided_norm_squares(step);
    count += step.rows;
  }
  device.sum_over_ranks(steps.front().squares, count);
  for (const DividedNorm& step : steps) device.divided_norm_scale(step);
}

namespace {

void norm_as_one_head(ModelDevice& device, const Norm& norm, Rows rows, int64_t count) {
  HeadSteps steps;
  steps.norm = norm;
  device.prepare_heads(steps, as_heads(rows, norm.dim()), count, 1, norm.dim(), nullptr);
}

// Multiplies the rows of a pass.
void multiply(const Pass& pass, const Linear& weights, const JoinedSteps& steps, Rows x, Rows out) {
  if (!steps) return pass.device->linear(weights, x, out, pass.rows);
  check_argument(pass.device->joined_linear(weights, steps, x, out, pass.rows),
                 "{} rows times {} x {} join no norms", pass.rows, weights.n, weights.k);
}

JoinedSteps without_norm_before(JoinedSteps steps) {
  steps.before = {};
  return steps;
}

HeadNorm head_norm(const Norm& norm) { return {norm.weight.data(), norm.epsilon, norm.plus_one}; }

}  // namespace

void multiply_first(const Pass& pass, const Linear& weights, Rows x, Rows out) {
  multiply(pass, weights, {.before = pass.joined.before}, x, out);
}

void multiply_last(const Pass& pass, const Linear& weights, Rows x, Rows out) {
  const JoinedSteps steps = without_norm_before(pass.joined);
  if (steps) return multiply(pass, weights, steps, x, out);
  pass.device->part_linear(weights, x, out, pass.rows);
}

SelfAttention::Buffers SelfAttention::buffers(Arena& arena, int64_t rows) const {
  Buffers buffers;
  buffers.q = arena.rows(rows, parts_.q.n);
  if (parts_.k) {
    buffers.k = arena.rows(rows, parts_.k.n);
    buffers.v = arena.rows(rows, parts_.v.n);
  } else {
    const int64_t k_width = int64_t{parts_.spec.kv_heads} * parts_.spec.head_dim;
    const int64_t v_width = int64_t{parts_.spec.kv_heads} * parts_.spec.head_dim_v;
    buffers.k = from_column(buffers.q, parts_.q.n - v_width - k_width);
    buffers.v = from_column(buffers.q, parts_.q.n - v_width);
  }
  buffers.out = arena.rows(rows, parts_.o.k);
  buffers.squares = parts_.q_row_norm ? arena.floats(2 * rows) : nullptr;
  return buffers;
}

void SelfAttention::norm_rows(const Pass& pass, const Buffers& scratch) const {
  if (!parts_.q_row_norm) return;
  ModelDevice& device = *pass.device;
  if (device.ranks() == nullptr) {
    norm_as_one_head(device, parts_.q_row_norm, scratch.q, pass.rows);
    norm_as_one_head(device, parts_.k_row_norm, scratch.k, pass.rows);
    return;
  }
  DividedNorm q;
  q.norm = parts_.q_row_norm;
  q.x = q.out = scratch.q;
  q.squares = scratch.squares;
  q.rows = pass.rows;
  q.parts = device.ranks()->size();
  DividedNorm k = q;
  k.norm = parts_.k_row_norm;
  k.x = k.out = scratch.k;
  k.squares += pass.rows;
  norm_over_ranks(device, std::array{q, k});
}

void SelfAttention::forward(Pass& pass, Rows x, Rows out) const {
  const AttentionSpec& spec = parts_.spec;
  const Buffers scratch = buffers(pass.arena, pass.rows);
  ModelDevice& device = *pass.device;
  if (parts_.k) {
    const ModelDevice::Product products[] = {
        {parts_.q, scratch.q}, {parts_.k, scratch.k}, {parts_.v, scratch.v}};
    device.linears(products, x, pass.rows);
  } else {
    multiply_first(pass, parts_.q, x, scratch.q);
  }

  LayerTensors tensors;
  tensors.layer = parts_.slot.layer;
  tensors.q = as_heads(scratch.q, parts_.has_output_gate ? 2 * spec.head_dim : spec.head_dim);
  tensors.k = as_heads(scratch.k, spec.head_dim);
  tensors.v = as_heads(scratch.v, spec.head_dim_v);
  tensors.out = as_heads(scratch.out, spec.head_dim_v);
  tensors.scores.sinks = parts_.sinks.empty() ? nullptr : parts_.sinks.data();
  if (parts_.in_backend) {
    tensors.rotary = rotary_tensors(parts_.in_backend, pass.positions);
    tensors.rotary.q_norm = head_norm(parts_.q_norm_in_backend);
    tensors.rotary.k_norm = head_norm(parts_.k_norm_in_backend);
  }
  norm_rows(pass, scratch);
  device.prepare_head_sets({parts_.q_steps, tensors.q, spec.q_heads},
                           {parts_.k_steps, tensors.k, spec.kv_heads}, pass.rows, spec.head_dim,
                           pass.positions);
  pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());

  if (parts_.has_output_gate) {
    device.sigmoid_gate(tensors.out, from_dim(tensors.q, spec.head_dim), pass.rows, spec.q_heads,
                        spec.head_dim_v, spec.head_dim_v);
  }
  multiply_last(pass, parts_.o, scratch.out, out);
}

bool SelfAttention::joins_norms(const ModelDevice& device, int64_t rows) const {
  return !parts_.k && device.joins_norms(parts_.q, rows) && device.joins_norms(parts_.o, rows);
}

MlpBuffers mlp_buffers(const MlpParts& parts, Arena& arena, int64_t rows) {
  const int64_t width = parts.width();
  MlpBuffers buffers;
  buffers.hidden = arena.rows(rows, 2 * width);
  buffers.activated = parts.alternates ? arena.rows(rows, width) : buffers.hidden;
  return buffers;
}

namespace {

// Computes activation(gate(x)) * up(x).
void apply_gates(const MlpParts& parts, ModelDevice& device, const MlpBuffers& buffers, Rows x,
                 int64_t rows) {
  if (device.gated_linear(parts, {}, x, buffers.activated, rows)) return;
  if (parts.up) {
    const ModelDevice::Product products[] = {
        {parts.gate, buffers.hidden}, {parts.up, from_column(buffers.hidden, parts.width())}};
    device.linears(products, x, rows);
  } else {
    device.linear(parts.gate, x, buffers.hidden, rows);
  }
  device.gated_activation(parts, buffers.hidden, buffers.activated, rows);
}

}  // namespace

void apply_mlp(const MlpParts& parts, ModelDevice& device, const MlpBuffers& buffers, Rows x,
               Rows out, int64_t rows) {
  apply_gates(parts, device, buffers, x, rows);
  device.linear(parts.down, buffers.activated, out, rows);
}

void Mlp::take_scratch(Arena& arena, int64_t rows) const { mlp_buffers(parts_, arena, rows); }

void Mlp::forward(Pass& pass, Rows x, Rows out) const {
  const MlpBuffers scratch = mlp_buffers(parts_, pass.arena, pass.rows);
  if (!pass.joined) {
    apply_gates(parts_, *pass.device, scratch, x, pass.rows);
  } else {
    check_argument(
        pass.device->gated_linear(parts_, pass.joined.before, x, scratch.activated, pass.rows),
        "{} rows of gates and ups join no norms", pass.rows);
  }
  multiply_last(pass, parts_.down, scratch.activated, out);
}

bool Mlp::joins_norms(const ModelDevice& device, int64_t rows) const {
  return !parts_.up && !parts_.alternates && device.joins_norms(parts_.gate, rows) &&
         device.joins_norms(parts_.down, rows);
}

}  // namespace fovea
