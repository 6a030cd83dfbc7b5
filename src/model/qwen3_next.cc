// SPDX-License-Identifier: Apache-2.0
// Qwen3-Next. Three of four layers are gated delta nets (arXiv:2412.06464), a linear attention with
// a recurrent state. The fourth is softmax attention with an output gate and rotary positions on a
// quarter of each head. Every layer ends in a mixture of experts with a gated shared expert. Norms
// are stored as weight - 1, except for the one after the delta net.
#include <cmath>

#include "core/check.h"
#include "model/architectures.h"
#include "model/eagle_parts.h"
#include "model/plain_decoder.h"
#include "model/shard.h"

namespace fovea {
namespace {

struct DeltaNetParts {
  AttentionSpec spec;
  LayerSlot slot;
  // Grouped by key head: [q | k | values | gates], [beta | decay] of the group's values.
  Linear qkvz, ba;
  std::span<const float> conv_weight;  // [q, k and v channels, conv_width]
  std::span<const float> a_log, dt_bias;
  Norm norm;  // normalises each head of the result, which is then multiplied by silu(z)
  Linear out;

  int64_t key_width() const { return int64_t{spec.linear.key_heads} * spec.linear.key_dim; }
  int64_t value_width() const { return int64_t{spec.linear.value_heads} * spec.linear.value_dim; }
};

class GatedDeltaNet : public Block {
 public:
  explicit GatedDeltaNet(DeltaNetParts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const AttentionSpec& spec = parts_.spec;
    const Buffers scratch = buffers(pass.arena, pass.rows);
    ModelDevice& device = *pass.device;
    device.linear(parts_.qkvz, x, {scratch.qkvz, parts_.qkvz.n, DType::f32}, pass.rows);
    device.linear(parts_.ba, x, {scratch.ba, parts_.ba.n, DType::f32}, pass.rows);

    kernels::DeltaInputsParams inputs;
    inputs.qkvz = scratch.qkvz;
    inputs.ba = scratch.ba;
    inputs.a_log = parts_.a_log.data();
    inputs.dt_bias = parts_.dt_bias.data();
    inputs.mixed = scratch.mixed;
    inputs.z = scratch.z;
    inputs.log_decay = scratch.log_decay;
    inputs.beta = scratch.beta;
    inputs.rows = pass.rows;
    inputs.key_heads = spec.linear.key_heads;
    inputs.value_heads = spec.linear.value_heads;
    inputs.key_dim = spec.linear.key_dim;
    inputs.value_dim = spec.linear.value_dim;
    device.delta_inputs(inputs);

    LayerTensors tensors;
    tensors.layer = parts_.slot.layer;
    tensors.linear.mixed = scratch.mixed;
    tensors.linear.conv_weight = parts_.conv_weight.data();
    tensors.linear.log_decay = scratch.log_decay;
    tensors.linear.beta = scratch.beta;
    tensors.linear.l2_normalise_qk = true;
    tensors.out =
        dense_rows(scratch.out, DType::f32, spec.linear.value_heads, spec.linear.value_dim);
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());

    const Rows result{scratch.out, parts_.value_width(), DType::f32};
    const Rows gate{scratch.z, parts_.value_width(), DType::f32};
    device.gated_norm({parts_.norm}, as_heads(result, spec.linear.value_dim),
                      as_heads(gate, spec.linear.value_dim),
                      as_heads(scratch.normed, spec.linear.value_dim), pass.rows,
                      spec.linear.value_heads);
    device.part_linear(parts_.out, scratch.normed, out, pass.rows);
  }

 private:
  // mixed: [all q | all k | all v], the input of the convolution. z: gates of the results.
  struct Buffers {
    float *qkvz, *ba, *mixed, *z, *log_decay, *beta, *out;
    Rows normed;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    const int64_t heads = parts_.spec.linear.value_heads;
    return {.qkvz = arena.floats(rows * parts_.qkvz.n),
            .ba = arena.floats(rows * parts_.ba.n),
            .mixed = arena.floats(rows * parts_.spec.linear.conv_dim()),
            .z = arena.floats(rows * parts_.value_width()),
            .log_decay = arena.floats(rows * heads),
            .beta = arena.floats(rows * heads),
            .out = arena.floats(rows * parts_.value_width()),
            .normed = arena.rows(rows, parts_.value_width())};
  }

  DeltaNetParts parts_;
};

AttentionSpec read_delta_net_spec(const JsonObject& config) {
  AttentionSpec spec;
  spec.kind = AttentionKind::gated_delta_net;
  spec.linear.key_heads = read_heads(config, "linear_num_key_heads");
  spec.linear.value_heads = read_heads(config, "linear_num_value_heads");
  spec.linear.key_dim = read_head_dim(config, "linear_key_head_dim");
  spec.linear.value_dim = read_head_dim(config, "linear_value_head_dim");
  spec.linear.conv_width = read_size(config, "linear_conv_kernel_dim");
  spec.scores.softmax_scale = 1 / std::sqrt(static_cast<float>(spec.linear.key_dim));
  if (spec.linear.value_heads % spec.linear.key_heads != 0) {
    config.refuse("linear_num_value_heads",
                  fmt::format("a multiple of linear_num_key_heads, {}", spec.linear.key_heads));
  }
  return spec;
}

// Keeps the key heads of the device's rank, and the value heads that belong to them.
void shard(DeltaNetParts& parts, ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return;
  const ShardRange heads = rank.range(parts.spec.linear.value_heads);
  const ShardRange keys = rank.range(parts.key_width()), values = rank.range(parts.value_width());
  parts.conv_weight = rows_of(parts.conv_weight, parts.spec.linear.conv_width,
                              {keys,
                               {parts.key_width() + keys.begin, keys.count},
                               {2 * parts.key_width() + values.begin, values.count}},
                              device);
  parts.spec = shard_spec(parts.spec, device);
  parts.qkvz = device.place_part(outputs_of(parts.qkvz, rank.range(parts.qkvz.n)));
  parts.ba = device.place_part(outputs_of(parts.ba, rank.range(parts.ba.n)));
  parts.a_log = values_of(parts.a_log, heads);
  parts.dt_bias = values_of(parts.dt_bias, heads);
  parts.out = device.place_part(inputs_of(parts.out, rank.range(parts.out.k), rank));
}

std::unique_ptr<Block> read_delta_net(const JsonObject& config, const Weights& weights,
                                      const AttentionSpec& spec, LayerSlot slot) {
  DeltaNetParts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t hidden = read_size(config, "hidden_size"), heads = spec.linear.value_heads;
  parts.qkvz =
      weights.located("in_proj_qkvz", spec.linear.conv_dim() + parts.value_width(), hidden);
  parts.ba = weights.located("in_proj_ba", 2 * heads, hidden);
  parts.conv_weight =
      weights["conv1d"].vector("weight", {spec.linear.conv_dim(), 1, spec.linear.conv_width});
  parts.a_log = weights.vector("A_log", {heads});
  parts.dt_bias = weights.vector("dt_bias", {heads});
  parts.norm = read_norm(config, weights, "norm", spec.linear.value_dim);
  parts.out = weights.located("out_proj", hidden, parts.value_width());
  shard(parts, weights.device());
  return std::make_unique<GatedDeltaNet>(std::move(parts));
}

std::unique_ptr<Block> read_gated_attention(const JsonObject& config, const Weights& weights,
                                            const AttentionSpec& spec, LayerSlot slot,
                                            const Rotary& rotary) {
  SelfAttentionParts parts = read_self_attention(config, weights, spec, {.has_output_gate = true});
  parts.slot = slot;
  parts.prepare_heads(read_norm(config, weights, "q_norm", spec.head_dim, true),
                      read_norm(config, weights, "k_norm", spec.head_dim, true), rotary);
  shard(parts, weights.device());
  return std::make_unique<SelfAttention>(std::move(parts));
}

MoeParts read_moe(const JsonObject& config, const Weights& weights, int64_t hidden) {
  const int64_t experts = config.integer("num_experts", 1, kernels::kMaxExperts);
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  parts.routing.score = kernels::MoeScore::softmax;
  parts.routing.normalise = config.boolean_or("norm_topk_prob", true);
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  parts.experts = weights.device().place(
      read_experts(weights, experts, hidden, read_size(config, "moe_intermediate_size")), false);
  parts.shared = read_mlp(weights["shared_expert"], hidden,
                          read_size(config, "shared_expert_intermediate_size"));
  parts.shared_gate = weights.linear("shared_expert_gate", 1, hidden);
  return parts;
}

kernels::RopeSpec read_rotation(const JsonObject& config, const AttentionSpec& spec) {
  return read_rope(config, spec.head_dim, {.rotates_parts = true, .partial_rotary_factor = 0.25});
}

AttentionSpec read_full_attention(const JsonObject& config) {
  return read_attention(config, {.kv_heads = 2, .head_dim = 256});
}

// Reads a mixture of experts on every `decoder_sparse_step`-th layer that is not in
// `mlp_only_layers`, otherwise an MLP.
std::unique_ptr<Block> read_feed(const JsonObject& config, const Weights& weights, int32_t layer) {
  const int64_t hidden = read_size(config, "hidden_size");
  if (!is_dense_layer(config, layer))
    return std::make_unique<Moe>(read_moe(config, weights, hidden));
  return std::make_unique<Mlp>(read_mlp(weights, hidden, read_size(config, "intermediate_size")));
}

}  // namespace

void read_qwen3_next_mtp(const JsonObject& config, const Weights& mtp, EagleParts& parts) {
  const int64_t hidden = parts.info.hidden;
  const Weights layer = mtp["layers"][0];
  parts.embedding_norm = read_norm(config, mtp, "pre_fc_norm_embedding", hidden, true);
  parts.hidden_norm = read_norm(config, mtp, "pre_fc_norm_hidden", hidden, true);
  parts.join = mtp.linear("fc", hidden, 2 * hidden);
  parts.mixer_norm = read_norm(config, layer, "input_layernorm", hidden, true);
  parts.feed_norm = read_norm(config, layer, "post_attention_layernorm", hidden, true);
  parts.final_norm = read_norm(config, mtp, "norm", hidden, true);
  parts.final_norm_makes_features = true;

  AttentionSpec spec = read_full_attention(config);
  spec.q_dtype = parts.device->activation_dtype();
  const LayerSlot slot = join_group(parts.info, 0, spec);
  const kernels::RopeSpec rope = read_rotation(config, spec);
  make_rope_table(rope, 1);  // throws if no table can be made
  parts.rotary = std::make_unique<RotaryTable>(RotaryTable{rope, {}});
  const Rotary rotary = {&parts.rotary->view, kernels::RopeLayout::half_split};
  parts.mixer = read_gated_attention(config, layer["self_attn"], spec, slot, rotary);
  parts.feed = read_feed(config, layer["mlp"], 0);
}

std::unique_ptr<Model> load_qwen3_next(const JsonObject& config, Checkpoint checkpoint,
                                       std::shared_ptr<ModelDevice> device) {
  constexpr std::string_view kLinear = "linear_attention";
  require_text(config, "hidden_act", "silu");
  DecoderParts parts =
      read_decoder(config, std::move(checkpoint), std::move(device), {.norms_plus_one = true});
  const int32_t hidden = parts.info.hidden;
  const AttentionSpec full = read_full_attention(config);
  const AttentionSpec linear = read_delta_net_spec(config);
  const Rotary rotary = make_rotary(read_rotation(config, full), parts);
  constexpr int64_t kMaxInterval = 1 << 20;
  std::vector<std::string_view> pattern(
      static_cast<size_t>(config.integer_or("full_attention_interval", 4, 1, kMaxInterval)),
      kLinear);
  pattern.back() = kFullAttention;
  const auto types = read_layer_types(config, {kFullAttention, kLinear}, pattern);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden, true);
    if (types[static_cast<size_t>(i)] == kLinear) {
      const AttentionSpec own = shard_spec(linear, *parts.device);
      const LayerSlot slot = join_group(parts.info, i, own);
      layer.mixer = read_delta_net(config, weights["linear_attn"], linear, slot);
    } else {
      const LayerSlot slot = join_group(parts.info, i, shard_spec(full, *parts.device));
      layer.mixer = read_gated_attention(config, weights["self_attn"], full, slot, rotary);
    }
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden, true);
    layer.feed = read_feed(config, weights["mlp"], i);
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
