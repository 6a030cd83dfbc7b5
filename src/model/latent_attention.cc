// SPDX-License-Identifier: Apache-2.0
#include "model/latent_attention.h"

#include <cmath>

#include "model/shard.h"

namespace fovea {
namespace {

struct LatentParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear q_a;  // hidden -> q_lora_rank; if empty, q_b reads the hidden rows
  Norm q_a_norm;
  Linear q_b;   // -> [q_heads, nope_dim + rope_dim]
  Linear kv_a;  // hidden -> [latent | rotary key]
  Norm latent_norm;
  Linear kv_b;  // latent -> [q_heads, nope_dim + v_dim], keys and values
  Linear o;
  Rotary rotary;  // empty: no positions
};

class LatentAttention : public Block {
 public:
  explicit LatentAttention(LatentParts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const AttentionSpec& spec = parts_.spec;
    const Buffers scratch = buffers(pass.arena, pass.rows);
    ModelDevice& device = *pass.device;
    project_query(pass, scratch, x);
    device.linear(parts_.kv_a, x, scratch.kv, pass.rows);

    LayerTensors tensors;
    tensors.layer = parts_.slot.layer;
    tensors.q = as_heads(scratch.q, spec.mla.nope_dim + spec.mla.rope_dim);
    tensors.mla.latent = as_heads(scratch.kv, parts_.kv_a.n);
    tensors.mla.k_rope = from_dim(tensors.mla.latent, spec.mla.kv_lora_rank);
    tensors.out = as_heads(scratch.out, spec.mla.v_dim);
    tensors.mla.weights = up_projections();
    device.prepare_heads({.norm = parts_.latent_norm}, tensors.mla.latent, pass.rows, 1,
                         spec.mla.kv_lora_rank, nullptr);
    if (spec.has_rope) {
      tensors.rotary = rotary_tensors(parts_.rotary, pass.positions);
    } else if (parts_.rotary) {
      device.prepare_heads({.rotary = parts_.rotary}, from_dim(tensors.q, spec.mla.nope_dim),
                           pass.rows, spec.q_heads, spec.mla.rope_dim, pass.positions);
      device.prepare_heads({.rotary = parts_.rotary}, tensors.mla.k_rope, pass.rows, 1,
                           spec.mla.rope_dim, pass.positions);
    }
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());
    device.part_linear(parts_.o, scratch.out, out, pass.rows);
  }

 private:
  struct Buffers {
    Rows q_latent, q, kv, out;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    return {.q_latent = arena.rows(rows, parts_.q_a.n),
            .q = arena.rows(rows, parts_.q_b.n),
            .kv = arena.rows(rows, parts_.kv_a.n),
            .out = arena.rows(rows, parts_.o.k)};
  }

  MlaWeights up_projections() const {
    const MlaSpec& mla = parts_.spec.mla;
    MlaWeights weights;
    weights.dtype = parts_.kv_b.dtype;
    weights.w_uk = parts_.kv_b.weight;
    weights.w_uv = parts_.kv_b.weight + mla.nope_dim * parts_.kv_b.stride *
                                            static_cast<int64_t>(dtype_bytes(parts_.kv_b.dtype));
    weights.w_uk_head_stride = weights.w_uv_head_stride =
        (int64_t{mla.nope_dim} + mla.v_dim) * parts_.kv_b.stride;
    return weights;
  }

  void project_query(const Pass& pass, const Buffers& scratch, Rows x) const {
    ModelDevice& device = *pass.device;
    if (parts_.q_a) {
      const int32_t rank = parts_.q_a.n;
      device.linear(parts_.q_a, x, scratch.q_latent, pass.rows);
      device.prepare_heads({.norm = parts_.q_a_norm}, as_heads(scratch.q_latent, rank), pass.rows,
                           1, rank, nullptr);
      x = scratch.q_latent;
    }
    device.linear(parts_.q_b, x, scratch.q, pass.rows);
  }

  LatentParts parts_;
};

// The norms of the latents have a fixed epsilon, independent of rms_norm_eps.
Norm read_latent_norm(const Weights& weights, std::string_view name, int64_t dim) {
  return {.weight = weights[name].vector("weight", {dim}, InitialValues::constant(1)),
          .epsilon = 1e-6f,
          .plus_one = false};
}

LatentParts read_parts(const JsonObject& config, const Weights& weights,
                       const AttentionSpec& spec) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t q_width = int64_t{spec.q_heads} * (spec.mla.nope_dim + spec.mla.rope_dim);
  const int64_t kv_head_width = int64_t{spec.mla.nope_dim} + spec.mla.v_dim;
  const bool has_bias = config.boolean_or("attention_bias", false);
  LatentParts parts;
  parts.spec = spec;
  const bool is_null = config.contains("q_lora_rank") && !config.has("q_lora_rank");
  if (!is_null) {
    const int64_t rank = read_size(config, "q_lora_rank");
    parts.q_a = weights.linear("q_a_proj", rank, hidden, has_bias);
    parts.q_a_norm = read_latent_norm(weights, "q_a_layernorm", rank);
    parts.q_b = weights.located("q_b_proj", q_width, rank);
  } else {
    parts.q_b = weights.located("q_proj", q_width, hidden);
  }
  parts.kv_a = weights.linear("kv_a_proj_with_mqa", spec.mla.row_dim(), hidden, has_bias);
  parts.latent_norm = read_latent_norm(weights, "kv_a_layernorm", spec.mla.kv_lora_rank);

  parts.kv_b = weights.located("kv_b_proj", spec.q_heads * kv_head_width, spec.mla.kv_lora_rank);
  parts.o = weights.located("o_proj", hidden, int64_t{spec.q_heads} * spec.mla.v_dim, has_bias);
  return parts;
}

// Keeps the heads of the device's rank. All ranks compute the latents. If they distribute the
// context, each attends for all heads and needs the up-projections of all.
void shard(LatentParts& parts, ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return;
  const MlaSpec& mla = parts.spec.mla;
  const HeadShard heads = heads_of(parts.spec, device);
  const int64_t q_width = int64_t{mla.nope_dim} + mla.rope_dim;
  const int64_t kv_width = int64_t{mla.nope_dim} + mla.v_dim;
  parts.q_b =
      device.place_part(outputs_of(parts.q_b, {heads.q_begin * q_width, heads.q_heads * q_width}));
  if (!shares_context(parts.spec, device)) {
    parts.kv_b = outputs_of(parts.kv_b, {heads.q_begin * kv_width, heads.q_heads * kv_width});
  }
  parts.kv_b = device.place_part(parts.kv_b);
  parts.o = device.place_part(inputs_of(
      parts.o, {int64_t{heads.q_begin} * mla.v_dim, int64_t{heads.q_heads} * mla.v_dim}, rank));
  parts.spec.q_heads = heads.q_heads;
}

}  // namespace

AttentionSpec read_latent_spec(const JsonObject& config, const kernels::RopeSpec& rope) {
  AttentionSpec spec;
  spec.kind = AttentionKind::mla;
  spec.q_heads = read_heads(config, "num_attention_heads");
  spec.kv_heads = 1;
  spec.mla.kv_lora_rank = read_size(config, "kv_lora_rank");
  spec.mla.rope_dim = read_head_dim(config, "qk_rope_head_dim");
  spec.mla.nope_dim = read_head_dim(config, "qk_nope_head_dim");
  spec.mla.v_dim = read_head_dim(config, "v_head_dim");
  double scale = 1 / std::sqrt(static_cast<double>(spec.mla.nope_dim + spec.mla.rope_dim));
  if (rope.scaling != kernels::RopeScaling::none && rope.mscale_all_dim != 0) {
    const double mscale = kernels::yarn_mscale(rope.factor, rope.mscale_all_dim);
    scale *= mscale * mscale;
  }
  spec.scores.softmax_scale = static_cast<float>(scale);
  return spec;
}

std::unique_ptr<Block> read_latent_attention(const JsonObject& config, const Weights& weights,
                                             const AttentionSpec& spec, LayerSlot slot,
                                             const Rotary& rotary) {
  LatentParts parts = read_parts(config, weights, spec);
  parts.slot = slot;
  parts.rotary = rotary;
  shard(parts, weights.device());
  return std::make_unique<LatentAttention>(std::move(parts));
}

}  // namespace fovea
