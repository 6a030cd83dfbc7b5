// SPDX-License-Identifier: Apache-2.0
#include "model/plain_decoder.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/shard.h"

namespace fovea {
namespace {

DecoderParts read_frame(const PlainDecoder& decoder, const JsonObject& config,
                        Checkpoint checkpoint, std::shared_ptr<ModelDevice> device) {
  DecoderDefaults defaults = {.tied_embeddings = decoder.tied_by_default,
                              .norms_plus_one = decoder.norms_plus_one};
  if (decoder.has_multipliers) {
    defaults.logit_factor = static_cast<float>(1 / read_positive(config, "logits_scaling", 1));
  }
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device), defaults);
  // Uses the exact factor of a model in fp32. A model in bf16 rounds it.
  if (decoder.scales_embeddings) {
    parts.embedding_factor = std::sqrt(static_cast<float>(parts.info.hidden));
  }
  if (decoder.has_multipliers) {
    const auto factor = [&](std::string_view field) {
      return static_cast<float>(read_positive(config, field, 1));
    };
    parts.embedding_factor = factor("embedding_multiplier");
    parts.branch_factor = factor("residual_multiplier");
  }
  if (decoder.has_logit_cap) {
    parts.logit_cap = read_cap(config, "final_logit_softcapping", decoder.default_logit_cap);
  }
  return parts;
}

AttentionSpec read_plain_attention(const PlainDecoder& decoder, const JsonObject& config) {
  AttentionSpec spec = read_attention(config, decoder.heads);
  spec.scores.has_sinks = decoder.has_sinks;
  if (!decoder.scale_field.empty()) {
    const bool is_missing = !config.contains(decoder.scale_field) && decoder.default_scale > 0;
    const int32_t scale =
        is_missing ? decoder.default_scale : read_size(config, decoder.scale_field);
    spec.scores.softmax_scale = 1 / std::sqrt(static_cast<float>(scale));
  }
  if (decoder.has_multipliers) {
    spec.scores.softmax_scale =
        static_cast<float>(read_positive(config, "attention_multiplier", 1));
  }
  if (decoder.has_attention_cap) {
    spec.scores.logit_cap =
        read_cap(config, "attn_logit_softcapping", decoder.default_attention_cap);
  }
  return spec;
}

std::unique_ptr<Block> read_mixer(const PlainContext& context, const AttentionSpec& spec,
                                  LayerSlot slot, const Rotary& rotary) {
  const PlainDecoder& decoder = context.decoder;
  const Weights weights = context.weights["self_attn"];
  SelfAttentionParts parts = read_self_attention(
      context.config, weights, spec,
      {.qkv_bias = decoder.qkv_bias, .o_bias = decoder.o_bias, .is_fused = decoder.fuses_qkv});
  parts.slot = slot;
  const auto norm = [&](std::string_view name, int64_t dim) {
    return read_norm(context.config, weights, name, dim, decoder.norms_plus_one);
  };
  if (decoder.qk_norm == QkNorm::heads) {
    parts.prepare_heads(norm("q_norm", spec.head_dim), norm("k_norm", spec.head_dim), rotary);
  } else {
    parts.prepare_heads({}, {}, rotary);
  }
  if (decoder.qk_norm == QkNorm::rows) {
    parts.q_row_norm = norm("q_norm", int64_t{spec.q_heads} * spec.head_dim);
    parts.k_row_norm = norm("k_norm", int64_t{spec.kv_heads} * spec.head_dim);
  }
  if (decoder.has_sinks) parts.sinks = weights.vector("sinks", {spec.q_heads});
  if (decoder.adjust_attention != nullptr) decoder.adjust_attention(context, parts);
  shard(parts, weights.device());
  return std::make_unique<SelfAttention>(std::move(parts));
}

DecoderLayer read_layer(const PlainContext& context, std::unique_ptr<Block> mixer) {
  const PlainDecoder& decoder = context.decoder;
  const int32_t hidden = read_size(context.config, "hidden_size");
  const auto norm = [&](std::string_view name) {
    return name.empty()
               ? Norm{}
               : read_norm(context.config, context.weights, name, hidden, decoder.norms_plus_one);
  };
  DecoderLayer layer;
  layer.mixer_norm = norm(decoder.norms.mixer);
  layer.mixer = std::move(mixer);
  layer.mixer_out_norm = norm(decoder.norms.mixer_out);
  layer.feed_norm = norm(decoder.norms.feed);
  layer.feed = decoder.read_feed(context);
  layer.feed_out_norm = norm(decoder.norms.feed_out);
  return layer;
}

// Returns true if the backend can rotate: there are no steps but norms on the heads of q and k, and
// all layers rotate, so that they form one group.
bool backend_rotates(const PlainDecoder& decoder, const std::vector<PlainLayer>& layers,
                     const ModelDevice& device) {
  return rotates_in_backend(device) && decoder.adjust_attention == nullptr &&
         std::ranges::all_of(layers, &PlainLayer::rotates);
}

MoeParts read_mixture(const PlainContext& context) {
  const JsonObject& config = context.config;
  const Mixture& mixture = context.decoder.mixture;
  const Weights weights = context.weights[mixture.block];
  const int32_t hidden = read_size(config, "hidden_size");
  // The number of experts has two names; newer configs use the second.
  constexpr std::string_view kNewName = "num_local_experts";
  const std::string_view field = config.has(mixture.count_field) ? mixture.count_field : kNewName;
  const int64_t experts = config.integer(field, 1, kernels::kMaxExperts);
  if (config.has(kNewName) && config.integer(kNewName, 1, kernels::kMaxExperts) != experts) {
    config.refuse(kNewName, fmt::format("{} as {} is", experts, field));
  }
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  parts.routing.score = kernels::MoeScore::softmax;
  parts.routing.normalise =
      mixture.normalise_field.empty() || config.boolean_or(mixture.normalise_field, false);
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  std::vector<MlpParts> mlps =
      read_experts(weights, experts, hidden, read_size(config, mixture.width_field), mixture.names);
  parts.experts = weights.device().place(std::move(mlps), false);
  return parts;
}

}  // namespace

std::unique_ptr<Block> read_plain_feed(const PlainContext& context) {
  const JsonObject& config = context.config;
  const PlainDecoder& decoder = context.decoder;
  const Mixture& mixture = decoder.mixture;
  if (!mixture.block.empty() &&
      !(mixture.has_dense_layers && is_dense_layer(config, context.layer))) {
    return std::make_unique<Moe>(read_mixture(context));
  }
  const bool has_bias = decoder.has_mlp_bias && config.boolean_or("mlp_bias", false);
  MlpParts parts = read_mlp(context.weights["mlp"], read_size(config, "hidden_size"),
                            read_size(config, "intermediate_size"), has_bias, decoder.mlp);
  parts.activation = decoder.activation;
  return std::make_unique<Mlp>(std::move(parts));
}

std::unique_ptr<Model> load_plain_decoder(const PlainDecoder& decoder, const JsonObject& config,
                                          Checkpoint checkpoint,
                                          std::shared_ptr<ModelDevice> device) {
  require_text(config, decoder.activation_field, decoder.activation_name);
  if (!decoder.refused_option.empty()) require_boolean(config, decoder.refused_option, false);
  DecoderParts parts = read_frame(decoder, config, std::move(checkpoint), std::move(device));
  const AttentionSpec spec = read_plain_attention(decoder, config);
  const bool by_type = decoder.rope_by_layer_type;
  const Rotary rotary =
      make_rotary(read_rope(config, spec.head_dim, decoder.rope, by_type ? kFullAttention : ""),
                  parts, decoder.rope_layout);
  Rotary sliding_rotary = rotary;
  if (by_type) {
    sliding_rotary =
        make_rotary(read_rope(config, spec.head_dim, decoder.sliding_rope, kSlidingAttention),
                    parts, decoder.rope_layout);
  }
  const std::vector<PlainLayer> layers = decoder.read_layers(decoder, config);
  const bool in_backend = backend_rotates(decoder, layers, *parts.device);
  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const PlainLayer& layer = layers[static_cast<size_t>(i)];
    const PlainContext context{decoder, config, parts.weights()["model.layers"][i], i};
    AttentionSpec own = spec;
    own.window = layer.window;
    own.chunk = layer.chunk;
    own.has_rope = in_backend;
    const Rotary& of_layer = layer.window > 0 ? sliding_rotary : rotary;
    const LayerSlot slot = join_group(parts.info, i, shard_spec(own, *parts.device));
    parts.layers.push_back(
        read_layer(context, read_mixer(context, own, slot, layer.rotates ? of_layer : Rotary{})));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
