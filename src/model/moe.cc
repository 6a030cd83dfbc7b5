// SPDX-License-Identifier: Apache-2.0
#include "model/layers.h"
#include "model/shard.h"

namespace fovea {

Moe::Buffers Moe::buffers(Arena& arena, int64_t rows) const {
  const int64_t choices = rows * parts_.routing.top_k;
  Buffers scratch{};
  scratch.logits = arena.float_rows(rows, parts_.router.n);
  scratch.weights = arena.floats(choices);
  scratch.ids = arena.ints(choices);
  if (parts_.shared.down) scratch.shared = mlp_buffers(parts_.shared, arena, rows);
  if (parts_.shared_gate) scratch.gate = arena.float_rows(rows, 1);
  scratch.experts =
      arena.bytes(static_cast<int64_t>(parts_.experts->scratch_bytes(rows, parts_.routing.top_k)));
  return scratch;
}

ExpertChoice Moe::route(const Pass& pass, const Buffers& scratch, Rows x) const {
  pass.device->linear(parts_.router, x, scratch.logits, pass.rows);
  kernels::MoeRoutingParams routing = parts_.routing;
  routing.logits = scratch.logits.floats();
  routing.rows = pass.rows;
  routing.experts = parts_.router.n;
  const ShardRange own = experts_of(routing.experts, *pass.device);
  routing.first_own = static_cast<int32_t>(own.begin);
  routing.own = static_cast<int32_t>(own.count);
  routing.bias = parts_.choice_bias.empty() ? nullptr : parts_.choice_bias.data();
  routing.ids = scratch.ids;
  routing.weights = scratch.weights;
  pass.device->moe_routing(routing);
  return {scratch.ids, scratch.weights, routing.top_k};
}

void Moe::shared(const Pass& pass, const Buffers& scratch, Rows x, Rows out) const {
  apply_mlp(parts_.shared, *pass.device, scratch.shared, x, out, pass.rows);
  if (!parts_.shared_gate) return;
  const int32_t hidden = parts_.router.k;
  pass.device->linear(parts_.shared_gate, x, scratch.gate, pass.rows);
  pass.device->sigmoid_gate(as_heads(out, hidden), as_heads(scratch.gate, 1), pass.rows, 1, hidden,
                            1);
}

void Moe::forward(Pass& pass, Rows x, Rows out) const {
  const Buffers scratch = buffers(pass.arena, pass.rows);
  const ExpertChoice choice = route(pass, scratch, x);
  const bool has_shared = bool{parts_.shared.down};
  if (has_shared) shared(pass, scratch, x, out);
  parts_.experts->run(choice, x, out, pass.rows, has_shared, scratch.experts);
}

}  // namespace fovea
