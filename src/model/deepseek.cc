// SPDX-License-Identifier: Apache-2.0
// DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437). Multi-head latent attention: the cache
// holds one normalised latent and one rotary key per token. The backend gets the up-projections and
// decides whether to absorb or apply them. A number of dense layers precede mixtures of experts
// with shared experts. V2 routes by softmax scores; V3 routes by sigmoid scores plus a bias that
// affects the choice only.
#include <cmath>

#include "core/check.h"
#include "core/quote.h"
#include "model/architectures.h"
#include "model/eagle_parts.h"
#include "model/from_config.h"
#include "model/shard.h"

namespace fovea {
namespace {

enum class Generation : uint8_t { v2, v3 };

bool has_mlp_bias(const JsonObject& config, Generation generation) {
  return generation == Generation::v2 && config.boolean_or("mlp_bias", false);
}

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
  Rotary rotary;
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
    } else {
      device.prepare_heads({.rotary = parts_.rotary}, from_dim(tensors.q, spec.mla.nope_dim),
                           pass.rows, spec.q_heads, spec.mla.rope_dim, pass.positions);
      device.prepare_heads({.rotary = parts_.rotary}, tensors.mla.k_rope, pass.rows, 1,
                           spec.mla.rope_dim, pass.positions);
    }
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());
    device.linear(parts_.o, scratch.out, out, pass.rows);
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

// The norms of the latents have a fixed epsilon, independent of rms_norm_eps.
Norm read_latent_norm(const Weights& weights, std::string_view name, int64_t dim) {
  return {.weight = weights[name].vector("weight", {dim}, InitialValues::constant(1)),
          .epsilon = 1e-6f,
          .plus_one = false};
}

LatentParts read_latent_attention(const JsonObject& config, const Weights& weights,
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

int64_t read_expert_count(const JsonObject& config) {
  return config.integer("n_routed_experts", 1, kernels::kMaxExperts);
}

void read_groups(const JsonObject& config, kernels::MoeRoutingParams& routing) {
  const auto experts = static_cast<int32_t>(read_expert_count(config));
  routing.groups = static_cast<int32_t>(config.integer("n_group", 1, experts));
  routing.top_groups = static_cast<int32_t>(config.integer("topk_group", 1, routing.groups));
  if (experts % routing.groups != 0) {
    config.refuse("n_routed_experts", fmt::format("a multiple of n_group, {}", routing.groups));
  }
}

// Sigmoid scores, and a bias that affects the choice only.
void read_v3_routing(const JsonObject& config, const Weights& weights, MoeParts& parts) {
  parts.choice_bias =
      weights["gate"].vector("e_score_correction_bias", {read_expert_count(config)});
  parts.routing.score = kernels::MoeScore::grouped_sigmoid;
  parts.routing.normalise = config.boolean_or("norm_topk_prob", true);
  parts.routing.factor = static_cast<float>(config.number("routed_scaling_factor", 1e-6, 1e6));
  read_groups(config, parts.routing);
}

// Softmax scores, over all experts or only those in the best groups.
void read_v2_routing(const JsonObject& config, MoeParts& parts) {
  const std::string method = config.text_or("topk_method", "greedy");
  parts.routing.factor =
      static_cast<float>(config.number_or("routed_scaling_factor", 1, 1e-6, 1e6));
  parts.routing.score = kernels::MoeScore::softmax;
  if (method == "greedy") return;
  if (method != "group_limited_greedy") {
    fail(ErrorCode::unsupported,
         "topk_method is {}; supported are 'greedy' and 'group_limited_greedy'", quote(method));
  }
  parts.routing.score = kernels::MoeScore::grouped_softmax;
  read_groups(config, parts.routing);
}

MoeParts read_moe(const JsonObject& config, const Weights& weights, Generation generation) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t experts = read_expert_count(config);
  const int64_t width = read_size(config, "moe_intermediate_size");
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  if (generation == Generation::v2) {
    read_v2_routing(config, parts);
  } else {
    read_v3_routing(config, weights, parts);
  }
  const int64_t reachable = experts / parts.routing.groups * parts.routing.top_groups;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, reachable));
  parts.experts = weights.device().place(read_experts(weights, experts, hidden, width), false);
  const int64_t shared = config.integer("n_shared_experts", 0, kernels::kMaxExperts);
  if (shared > 0) {
    parts.shared = read_mlp(weights["shared_experts"], hidden, shared * width,
                            has_mlp_bias(config, generation));
  }
  return parts;
}

std::unique_ptr<Block> read_feed(const JsonObject& config, const Weights& weights, int64_t layer,
                                 Generation generation) {
  const int64_t layers = read_layers(config);
  const int64_t dense_layers = generation == Generation::v2
                                   ? config.integer_or("first_k_dense_replace", 0, 0, layers)
                                   : config.integer("first_k_dense_replace", 0, layers);
  if (layer >= dense_layers) {
    return std::make_unique<Moe>(read_moe(config, weights, generation));
  }
  return std::make_unique<Mlp>(read_mlp(weights, read_size(config, "hidden_size"),
                                        read_size(config, "intermediate_size"),
                                        has_mlp_bias(config, generation)));
}

kernels::RopeLayout rope_layout(const JsonObject& config, Generation generation) {
  const bool is_interleaved =
      generation == Generation::v2 || config.boolean_or("rope_interleave", true);
  return is_interleaved ? kernels::RopeLayout::interleaved : kernels::RopeLayout::half_split;
}

void refuse_unknown_options(const JsonObject& config, Generation generation) {
  require_text(config, "hidden_act", "silu");
  if (config.integer_or("moe_layer_freq", 1, 1, 1 << 20) != 1) {
    fail(ErrorCode::unsupported, "moe_layer_freq is {}; supported is 1",
         config.integer("moe_layer_freq", 1, 1 << 20));
  }
  if (generation == Generation::v2) {
    require_text(config, "scoring_func", "softmax");
    // The models' original code divides by the sum; transformers does not.
    require_boolean(config, "norm_topk_prob", false);
  } else {
    require_text(config, "scoring_func", "sigmoid");
    require_text(config, "topk_method", "noaux_tc");
  }
}

std::unique_ptr<Model> load_deepseek(const JsonObject& config, Checkpoint checkpoint,
                                     std::shared_ptr<ModelDevice> device, Generation generation) {
  refuse_unknown_options(config, generation);
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  const int32_t hidden = parts.info.hidden;
  const kernels::RopeSpec rope = read_rope(config, read_head_dim(config, "qk_rope_head_dim"));
  AttentionSpec spec = read_latent_spec(config, rope);
  spec.has_rope = rotates_in_backend(*parts.device);
  const Rotary rotary = make_rotary(rope, parts, rope_layout(config, generation));

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    LatentParts attention = read_latent_attention(config, weights["self_attn"], spec);
    attention.slot = join_group(parts.info, i, shard_spec(spec, *parts.device));
    shard(attention, *parts.device);
    attention.rotary = rotary;

    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = std::make_unique<LatentAttention>(std::move(attention));
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = read_feed(config, weights["mlp"], i, generation);
  }
  return make_decoder(std::move(parts));
}

}  // namespace

void read_deepseek_mtp(const JsonObject& config, const Weights& layer, EagleParts& parts) {
  constexpr Generation kV3 = Generation::v3;
  refuse_unknown_options(config, kV3);
  const int64_t hidden = parts.info.hidden;
  parts.embedding_norm = read_norm(config, layer, "enorm", hidden);
  parts.hidden_norm = read_norm(config, layer, "hnorm", hidden);
  parts.join = layer.linear("eh_proj", hidden, 2 * hidden);
  parts.mixer_norm = read_norm(config, layer, "input_layernorm", hidden);
  parts.feed_norm = read_norm(config, layer, "post_attention_layernorm", hidden);
  parts.final_norm = read_norm(config, layer["shared_head"], "norm", hidden);

  const kernels::RopeSpec rope = read_rope(config, read_head_dim(config, "qk_rope_head_dim"));
  make_rope_table(rope, 1);  // throws if no table can be made
  AttentionSpec spec = read_latent_spec(config, rope);
  spec.has_rope = rotates_in_backend(*parts.device);
  spec.q_dtype = parts.device->activation_dtype();
  LatentParts attention = read_latent_attention(config, layer["self_attn"], spec);
  attention.slot = join_group(parts.info, 0, spec);
  parts.rotary = std::make_unique<RotaryTable>(RotaryTable{rope, {}});
  attention.rotary = {&parts.rotary->view, rope_layout(config, kV3)};
  parts.mixer = std::make_unique<LatentAttention>(std::move(attention));
  parts.feed = read_feed(config, layer["mlp"], read_layers(config), kV3);
}

std::unique_ptr<Model> load_deepseek_v2(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  return load_deepseek(config, std::move(checkpoint), std::move(device), Generation::v2);
}

std::unique_ptr<Model> load_deepseek_v3(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  return load_deepseek(config, std::move(checkpoint), std::move(device), Generation::v3);
}

}  // namespace fovea
