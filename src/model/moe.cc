// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "model/layers.h"

namespace fovea {

Moe::Buffers Moe::buffers(Arena& arena, int64_t rows) const {
  const int64_t experts = parts_.router.n, hidden = parts_.router.k;
  const int64_t choices = rows * parts_.routing.top_k;
  int64_t widest = parts_.shared.down ? parts_.shared.hidden_floats() : 0;
  for (const MlpParts& expert : parts_.experts) widest = std::max(widest, expert.hidden_floats());
  return {.logits = arena.floats(rows * experts),
          .weights = arena.floats(choices),
          .gathered = arena.floats(rows * hidden),
          .hidden = arena.floats(rows * widest),
          .expert_out = arena.floats(rows * hidden),
          .expert_weights = arena.floats(choices),
          .ids = arena.ints(choices),
          .begins = arena.ints(experts + 1),
          .rows_of_expert = arena.ints(choices)};
}

// Chooses experts for every row, then lists the rows of every expert in ascending order:
// rows_of_expert[begins[e] .. begins[e + 1]).
void Moe::route(const Pass& pass, const Buffers& scratch, float* x) const {
  const int32_t experts = parts_.router.n;
  parts_.router.apply({x, parts_.router.k}, {scratch.logits, experts}, pass.rows, *pass.threads);
  kernels::MoeRoutingParams routing = parts_.routing;
  routing.logits = scratch.logits;
  routing.rows = pass.rows;
  routing.experts = experts;
  routing.bias = parts_.choice_bias.empty() ? nullptr : parts_.choice_bias.data();
  routing.ids = scratch.ids;
  routing.weights = scratch.weights;
  kernels::moe_routing(routing, *pass.threads);

  const int64_t choices = pass.rows * routing.top_k;
  int32_t* const begins = scratch.begins;
  std::fill_n(begins, experts + 1, 0);
  for (int64_t i = 0; i < choices; ++i) ++begins[scratch.ids[i] + 1];
  for (int32_t e = 0; e < experts; ++e) begins[e + 1] += begins[e];
  for (int64_t i = 0; i < choices; ++i) {
    const int32_t place = begins[scratch.ids[i]]++;
    scratch.rows_of_expert[place] = static_cast<int32_t>(i / routing.top_k);
    scratch.expert_weights[place] = scratch.weights[i];
  }
  // Filling moved every begin to its end, which is the next one's begin.
  std::copy_backward(begins, begins + experts, begins + experts + 1);
  begins[0] = 0;
}

void Moe::shared(const Pass& pass, const Buffers& scratch, float* x, float* out) const {
  const int32_t hidden = parts_.router.k;
  if (!parts_.shared.down) {
    std::fill_n(out, pass.rows * hidden, 0.0f);
    return;
  }
  parts_.shared.apply({x, hidden}, {out, hidden}, pass.rows, scratch.hidden, *pass.threads);
  if (!parts_.shared_gate) return;
  float* const gate = scratch.gathered;  // not in use yet
  parts_.shared_gate.apply({x, hidden}, {gate, 1}, pass.rows, *pass.threads);
  kernels::SigmoidGateParams params;
  params.x = {out, hidden, hidden};
  params.gate = {gate, 1, 1};
  params.rows = pass.rows;
  params.dim = hidden;
  params.gate_dim = 1;
  kernels::sigmoid_gate(params, *pass.threads);
}

void Moe::forward(Pass& pass, float* x, float* out) const {
  const int32_t hidden = parts_.router.k;
  const Buffers scratch = buffers(pass.arena, pass.rows);
  route(pass, scratch, x);
  shared(pass, scratch, x, out);
  for (size_t e = 0; e < parts_.experts.size(); ++e) {
    const int32_t begin = scratch.begins[e];
    const int64_t rows = scratch.begins[e + 1] - begin;
    if (rows == 0) continue;
    kernels::ExpertRowsParams move;
    move.index = scratch.rows_of_expert + begin;
    move.rows = rows;
    move.dim = hidden;
    move.x_stride = move.out_stride = hidden;
    const float* const weights = scratch.expert_weights + begin;

    move.x = x;
    move.out = scratch.gathered;
    move.weight = parts_.weights_scale_input ? weights : nullptr;
    kernels::gather_rows(move, *pass.threads);
    parts_.experts[e].apply({scratch.gathered, hidden}, {scratch.expert_out, hidden}, rows,
                            scratch.hidden, *pass.threads);
    move.x = scratch.expert_out;
    move.out = out;
    move.weight = parts_.weights_scale_input ? nullptr : weights;
    kernels::scatter_add_rows(move, *pass.threads);
  }
}

}  // namespace fovea
