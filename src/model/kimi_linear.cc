// SPDX-License-Identifier: Apache-2.0
// Kimi Linear (arXiv:2510.26692). Most layers are Kimi delta attention, a linear attention with a
// recurrent state and a gate for each channel of keys; the others are multi-head latent attention
// without positions. A number of dense layers precede mixtures of experts with a shared expert.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "model/architectures.h"
#include "model/latent_attention.h"
#include "model/shard.h"

namespace fovea {
namespace {

struct KdaParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear q, k, v;                      // if k and v are empty, q contains the rows of all three
  std::span<const float> conv_weight;  // [conv_dim, conv_width]
  // hidden -> latent -> [heads, key_dim]: log decays before their gate, and gates of the results.
  Linear decay_a, decay_b, gate_a, gate_b;
  Linear beta;                            // -> [heads]
  std::span<const float> a_log, dt_bias;  // [heads], [heads, key_dim]
  Norm norm;                              // normalises each head of the result
  Linear out;

  int64_t width() const { return int64_t{spec.linear.value_heads} * spec.linear.value_dim; }
};

class KimiDeltaAttention : public Block {
 public:
  explicit KimiDeltaAttention(KdaParts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const LinearSpec& linear = parts_.spec.linear;
    const Buffers scratch = buffers(pass.arena, pass.rows);
    ModelDevice& device = *pass.device;
    const auto width = parts_.width();
    device.linear(parts_.q, x, scratch.mixed, pass.rows);
    if (parts_.k) {
      device.linear(parts_.k, x, from_column(scratch.mixed, width), pass.rows);
      device.linear(parts_.v, x, from_column(scratch.mixed, 2 * width), pass.rows);
    }
    device.linear(parts_.decay_a, x, scratch.latent, pass.rows);
    device.linear(parts_.decay_b, scratch.latent, scratch.decays, pass.rows);
    device.linear(parts_.gate_a, x, scratch.latent, pass.rows);
    device.linear(parts_.gate_b, scratch.latent, scratch.gates, pass.rows);
    device.linear(parts_.beta, x, scratch.beta, pass.rows);

    kernels::KdaGatesParams gates;
    gates.a_log = parts_.a_log.data();
    gates.dt_bias = parts_.dt_bias.data();
    gates.log_decay = scratch.decays.floats();
    gates.beta = scratch.beta.floats();
    gates.rows = pass.rows;
    gates.heads = linear.value_heads;
    gates.key_dim = linear.key_dim;
    device.kda_gates(gates);

    LayerTensors tensors;
    tensors.layer = parts_.slot.layer;
    tensors.linear.mixed = scratch.mixed.floats();
    tensors.linear.conv_weight = parts_.conv_weight.data();
    tensors.linear.log_decay = gates.log_decay;
    tensors.linear.beta = gates.beta;
    tensors.linear.l2_normalise_qk = true;
    tensors.out = as_heads(scratch.out, linear.value_dim);
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());

    device.gated_norm({parts_.norm, kernels::NormGate::sigmoid}, tensors.out,
                      as_heads(scratch.gates, linear.value_dim),
                      as_heads(scratch.normed, linear.value_dim), pass.rows, linear.value_heads);
    device.part_linear(parts_.out, scratch.normed, out, pass.rows);
  }

 private:
  // mixed: [all q | all k | all v], the input of the convolution.
  struct Buffers {
    Rows mixed, decays, gates, beta, out;  // f32
    Rows latent, normed;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    return {.mixed = arena.float_rows(rows, 3 * parts_.width()),
            .decays = arena.float_rows(rows, parts_.width()),
            .gates = arena.float_rows(rows, parts_.width()),
            .beta = arena.float_rows(rows, parts_.beta.n),
            .out = arena.float_rows(rows, parts_.width()),
            .latent = arena.rows(rows, parts_.decay_a.n),
            .normed = arena.rows(rows, parts_.width())};
  }

  KdaParts parts_;
};

AttentionSpec read_kda_spec(const JsonObject& linear) {
  AttentionSpec spec;
  spec.kind = AttentionKind::kda;
  spec.linear.key_heads = spec.linear.value_heads = read_heads(linear, "num_heads");
  spec.linear.key_dim = spec.linear.value_dim = read_head_dim(linear, "head_dim");
  spec.linear.conv_width = read_size(linear, "short_conv_kernel_size");
  return spec;
}

// Joins the convolutions of q, k and v, each cut down to the channels of the rank.
std::span<const float> read_conv(const Weights& weights, const AttentionSpec& spec,
                                 ShardRange channels) {
  const int64_t taps = spec.linear.conv_width;
  const int64_t width = int64_t{spec.linear.value_heads} * spec.linear.value_dim;
  std::vector<float> joined;
  for (const char* name : {"q_conv1d", "k_conv1d", "v_conv1d"}) {
    const std::vector<float> whole =
        weights.device().read(weights[name].vector("weight", {width, 1, taps}));
    const auto begin = whole.begin() + channels.begin * taps;
    joined.insert(joined.end(), begin, begin + channels.count * taps);
  }
  return weights.device().place(std::move(joined));
}

// Keeps the heads of the device's rank. All ranks compute the latents of decays and gates.
void shard(KdaParts& parts, ShardRange channels, ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return;
  const int64_t width = parts.width();
  const ShardRange heads = rank.range(parts.spec.linear.value_heads);
  const bool is_joined = !parts.k;
  if (is_joined) parts.k = parts.v = parts.q;
  const auto cut = [&](const Linear& matrix, int64_t first) {
    return outputs_of(matrix, {(is_joined ? first : 0) + channels.begin, channels.count});
  };
  parts.v = cut(parts.v, 2 * width);
  parts.k = cut(parts.k, width);
  parts.q = cut(parts.q, 0);
  if (const Linear joined = device.join_parts(std::array{parts.q, parts.k, parts.v})) {
    parts.q = joined;
    parts.k = parts.v = {};
  } else {
    for (Linear* const matrix : {&parts.q, &parts.k, &parts.v}) {
      *matrix = device.place_part(*matrix);
    }
  }
  parts.decay_b = device.place_part(outputs_of(parts.decay_b, channels));
  parts.gate_b = device.place_part(outputs_of(parts.gate_b, channels));
  parts.beta = device.place_part(outputs_of(parts.beta, heads));
  parts.out = device.place_part(inputs_of(parts.out, channels, rank));
  parts.a_log = values_of(parts.a_log, heads);
  parts.dt_bias = values_of(parts.dt_bias, channels);
  parts.spec = shard_spec(parts.spec, device);
}

std::unique_ptr<Block> read_kda(const JsonObject& config, const Weights& weights,
                                const AttentionSpec& spec, LayerSlot slot) {
  KdaParts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t hidden = read_size(config, "hidden_size"), width = parts.width();
  const int64_t heads = spec.linear.value_heads, latent = spec.linear.key_dim;
  const ShardRange channels = RankOf(weights.device()).range(width);
  parts.q = weights.joined({{"q_proj", width}, {"k_proj", width}, {"v_proj", width}}, hidden);
  if (!parts.q) {
    parts.q = weights.located("q_proj", width, hidden);
    parts.k = weights.located("k_proj", width, hidden);
    parts.v = weights.located("v_proj", width, hidden);
  }
  parts.conv_weight = read_conv(weights, spec, channels);
  parts.decay_a = weights.linear("f_a_proj", latent, hidden);
  parts.decay_b = weights.located("f_b_proj", width, latent);
  parts.gate_a = weights.linear("g_a_proj", latent, hidden);
  parts.gate_b = weights.located("g_b_proj", width, latent);
  parts.beta = weights.located("b_proj", heads, hidden);
  parts.a_log = weights.vector("A_log", {1, 1, heads, 1});
  parts.dt_bias = weights.vector("dt_bias", {width});
  parts.norm = read_norm(config, weights, "o_norm", spec.linear.value_dim);
  parts.out = weights.located("o_proj", hidden, width);
  shard(parts, channels, weights.device());
  return std::make_unique<KimiDeltaAttention>(std::move(parts));
}

// Returns for each layer whether it is KDA: `layer_types` says so or, without it, lists of layers
// that are counted from 1.
std::vector<bool> read_kda_layers(const JsonObject& config, const JsonObject& linear) {
  constexpr std::string_view kLinear = "linear_attention";
  std::vector<bool> is_kda;
  if (config.has("layer_types")) {
    for (const std::string& type : read_layer_types(config, {kFullAttention, kLinear}, {})) {
      is_kda.push_back(type == kLinear);
    }
    return is_kda;
  }
  const int32_t layers = read_layers(config);
  is_kda.resize(static_cast<size_t>(layers));
  std::vector<bool> is_listed(is_kda.size());
  for (const std::string_view field : {"kda_layers", "full_attn_layers"}) {
    for (const int64_t layer : linear.integers(field, 1, layers)) {
      const size_t index = static_cast<size_t>(layer) - 1;
      if (is_listed[index]) linear.refuse(field, fmt::format("without {}, listed before", layer));
      is_listed[index] = true;
      is_kda[index] = field == "kda_layers";
    }
  }
  if (std::ranges::find(is_listed, false) != is_listed.end()) {
    linear.refuse("kda_layers", "all layers that full_attn_layers does not list");
  }
  return is_kda;
}

// Returns for each layer whether it ends in a mixture of experts.
std::vector<bool> read_sparse_layers(const JsonObject& config) {
  constexpr std::string_view kField = "mlp_layer_types";
  const int32_t layers = read_layers(config);
  const int64_t dense = config.integer_or("first_k_dense_replace", 1, 0, layers);
  std::vector<bool> is_sparse;
  if (!config.has(kField)) {
    for (int64_t i = 0; i < layers; ++i) is_sparse.push_back(i >= dense);
    return is_sparse;
  }
  for (const std::string& type : config.texts(kField)) {
    if (type == "dense" || type == "sparse") is_sparse.push_back(type == "sparse");
  }
  if (is_sparse.size() != static_cast<size_t>(layers) ||
      config.texts(kField).size() != is_sparse.size()) {
    config.refuse(kField, fmt::format("an array of {} times dense or sparse", layers));
  }
  return is_sparse;
}

MoeParts read_moe(const JsonObject& config, const Weights& weights) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t experts = config.integer("num_experts", 1, kernels::kMaxExperts);
  const int64_t width = read_size(config, "moe_intermediate_size");
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  parts.choice_bias = weights["gate"].vector("e_score_correction_bias", {experts});
  parts.routing.score = kernels::MoeScore::grouped_sigmoid;
  parts.routing.normalise = config.boolean_or("moe_renormalize", true);
  parts.routing.factor = static_cast<float>(config.number("routed_scaling_factor", 1e-6, 1e6));
  parts.routing.groups = static_cast<int32_t>(config.integer_or("num_expert_group", 1, 1, experts));
  parts.routing.top_groups =
      static_cast<int32_t>(config.integer_or("topk_group", 1, 1, parts.routing.groups));
  if (experts % parts.routing.groups != 0) {
    config.refuse("num_experts",
                  fmt::format("a multiple of num_expert_group, {}", parts.routing.groups));
  }
  const int64_t reachable = experts / parts.routing.groups * parts.routing.top_groups;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_token", 1, reachable));
  parts.experts = weights.device().place(
      read_experts(weights, experts, hidden, width, {.gate = "w1", .up = "w3", .down = "w2"}),
      false);
  const int64_t shared = config.integer_or("num_shared_experts", 0, 0, kernels::kMaxExperts);
  if (shared > 0) parts.shared = read_mlp(weights["shared_experts"], hidden, shared * width);
  return parts;
}

void refuse_unknown_options(const JsonObject& config) {
  require_text(config, "hidden_act", "silu");
  require_text(config, "moe_router_activation_func", "sigmoid");
  require_boolean(config, "mla_use_nope", true);
  if (config.integer_or("moe_layer_freq", 1, 1, 1 << 20) != 1) {
    fail(ErrorCode::unsupported, "moe_layer_freq is {}; supported is 1",
         config.integer("moe_layer_freq", 1, 1 << 20));
  }
}

}  // namespace

std::unique_ptr<Model> load_kimi_linear(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  refuse_unknown_options(config);
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device),
                                    {.context_field = "model_max_length"});
  const int32_t hidden = parts.info.hidden;
  const JsonObject linear = config.object("linear_attn_config");
  const AttentionSpec latent = read_latent_spec(config), kda = read_kda_spec(linear);
  const std::vector<bool> is_kda = read_kda_layers(config, linear);
  const std::vector<bool> is_sparse = read_sparse_layers(config);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const auto index = static_cast<size_t>(i);
    const AttentionSpec& spec = is_kda[index] ? kda : latent;
    const LayerSlot slot = join_group(parts.info, i, shard_spec(spec, *parts.device));
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = is_kda[index] ? read_kda(config, weights["self_attn"], kda, slot)
                                : read_latent_attention(config, weights["self_attn"], latent, slot);
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    if (is_sparse[index]) {
      layer.feed = std::make_unique<Moe>(read_moe(config, weights["block_sparse_moe"]));
    } else {
      layer.feed = std::make_unique<Mlp>(
          read_mlp(weights["mlp"], hidden, read_size(config, "intermediate_size")));
    }
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
