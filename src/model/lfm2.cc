// SPDX-License-Identifier: Apache-2.0
// LFM2, and LFM2-MoE, which has mixtures of experts behind a number of dense layers. Most layers
// are short convolutions with a gate before and one behind; the others are softmax attention.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/architectures.h"
#include "model/from_config.h"
#include "model/shard.h"

namespace fovea {
namespace {

constexpr std::string_view kEpsilon = "norm_eps";
constexpr std::string_view kLayerTypes = "layer_types", kConv = "conv";
constexpr MlpNames kMlpNames = {.gate = "w1", .up = "w3", .down = "w2"};

struct ShortConvParts {
  AttentionSpec spec;
  LayerSlot slot;
  std::vector<Linear> in;              // [gate before | gate behind | x], one matrix or several
  std::span<const float> conv_weight;  // [channels, conv_width]
  std::span<const float> conv_bias;    // [channels] or empty
  Linear out;

  int32_t channels() const { return spec.linear.value_heads; }
};

class ShortConv : public Block {
 public:
  explicit ShortConv(ShortConvParts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const Buffers scratch = buffers(pass.arena, pass.rows);
    const int64_t channels = parts_.channels();
    ModelDevice& device = *pass.device;
    int64_t column = 0;
    for (const Linear& in : parts_.in) {
      multiply_first(pass, in, x, from_column(scratch.projected, column));
      column += in.n;
    }
    const Rows before = scratch.projected, behind = from_column(before, channels);
    device.multiply(from_column(before, 2 * channels), before, scratch.mixed, pass.rows, channels);

    const Rows convolved = before;  // whose gates are used up
    LayerTensors tensors;
    tensors.layer = parts_.slot.layer;
    tensors.linear.mixed = scratch.mixed.floats();
    tensors.linear.conv_weight = parts_.conv_weight.data();
    if (!parts_.conv_bias.empty()) tensors.linear.conv_bias = parts_.conv_bias.data();
    tensors.linear.plain_conv = true;
    tensors.out = as_heads(convolved, 1);
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());

    device.multiply(convolved, behind, scratch.gated, pass.rows, channels);
    multiply_last(pass, parts_.out, scratch.gated, out);
  }

  bool joins_norms(const ModelDevice& device, int64_t rows) const override {
    return parts_.in.size() == 1 && device.joins_norms(parts_.in[0], rows) &&
           device.joins_norms(parts_.out, rows);
  }

 private:
  struct Buffers {
    Rows projected, mixed;  // f32
    Rows gated;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    const int64_t channels = parts_.channels();
    return {.projected = arena.float_rows(rows, 3 * channels),
            .mixed = arena.float_rows(rows, channels),
            .gated = arena.rows(rows, channels)};
  }

  ShortConvParts parts_;
};

AttentionSpec read_conv_spec(const JsonObject& config) {
  AttentionSpec spec;
  spec.kind = AttentionKind::short_conv;
  spec.linear.value_heads = read_size(config, "hidden_size");
  spec.linear.value_dim = 1;
  spec.linear.conv_width = static_cast<int32_t>(config.integer_or("conv_L_cache", 3, 2, 64));
  return spec;
}

// Keeps the channels of the device's rank.
void shard(ShortConvParts& parts, const Linear& in, ModelDevice& device) {
  const RankOf rank(device);
  const int64_t all = parts.channels();
  const ShardRange own = rank.range(all);
  const auto behind = [&](int64_t first) { return ShardRange{first + own.begin, own.count}; };
  parts.in = join_outputs(in, {own, behind(all), behind(2 * all)}, device);
  if (rank.alone()) return;
  const int64_t taps = parts.spec.linear.conv_width;
  parts.conv_weight = values_of(parts.conv_weight, {own.begin * taps, own.count * taps});
  if (!parts.conv_bias.empty()) parts.conv_bias = values_of(parts.conv_bias, own);
  parts.out = device.place_part(inputs_of(parts.out, own, rank));
  parts.spec = shard_spec(parts.spec, device);
}

std::unique_ptr<Block> read_conv(const JsonObject& config, const Weights& weights,
                                 const AttentionSpec& spec, LayerSlot slot) {
  ShortConvParts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t hidden = parts.channels();
  const bool has_bias = config.boolean_or("conv_bias", false);
  const Linear in = weights.located("in_proj", 3 * hidden, hidden, has_bias);
  parts.conv_weight = weights["conv"].vector("weight", {hidden, 1, spec.linear.conv_width});
  if (has_bias) parts.conv_bias = weights["conv"].vector("bias", {hidden});
  parts.out = weights.located("out_proj", hidden, hidden, has_bias);
  shard(parts, in, weights.device());
  return std::make_unique<ShortConv>(std::move(parts));
}

Norm read_norm_of(const JsonObject& config, const Weights& weights, std::string_view name,
                  int64_t dim) {
  return {.weight = weights[name].vector("weight", {dim}, InitialValues::constant(1)),
          .epsilon = read_epsilon(config, kEpsilon)};
}

std::unique_ptr<Block> read_full_attention(const JsonObject& config, const Weights& weights,
                                           const AttentionSpec& spec, LayerSlot slot,
                                           const Rotary& rotary) {
  SelfAttentionParts parts = read_self_attention(
      config, weights, spec, {.qkv_bias = Bias::never, .o_bias = Bias::never, .out = "out_proj"});
  parts.slot = slot;
  parts.prepare_heads(read_norm_of(config, weights, "q_layernorm", spec.head_dim),
                      read_norm_of(config, weights, "k_layernorm", spec.head_dim), rotary);
  shard(parts, weights.device());
  return std::make_unique<SelfAttention>(std::move(parts));
}

// Returns for each layer whether it is a convolution: `layer_types` says so or, without it,
// `full_attn_idxs` lists the others. Without both there are none.
std::vector<bool> read_conv_layers(const JsonObject& config) {
  constexpr std::string_view kIndices = "full_attn_idxs";
  std::vector<bool> is_conv;
  if (config.has(kLayerTypes) || !config.has(kIndices)) {
    const std::vector<std::string_view> pattern = {kFullAttention};
    for (const std::string& type : read_layer_types(config, {kFullAttention, kConv}, pattern)) {
      is_conv.push_back(type == kConv);
    }
    return is_conv;
  }
  const int32_t layers = read_layers(config);
  is_conv.resize(static_cast<size_t>(layers), true);
  for (const int64_t layer : config.integers(kIndices, 0, layers - 1)) {
    is_conv[static_cast<size_t>(layer)] = false;
  }
  return is_conv;
}

// Reads the width of an MLP, which the config gives before it is adjusted.
int64_t read_width(const JsonObject& config) {
  constexpr std::string_view kFactor = "block_ffn_dim_multiplier";
  constexpr int64_t kMaxWidth = 1 << 24;
  const std::string_view field = config.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size";
  int64_t width = read_size(config, field);
  if (!config.boolean_or("block_auto_adjust_ff_dim", true)) return width;
  width = 2 * width / 3;
  const double factor = config.contains(kFactor) ? config.number(kFactor, 1e-3, 1e3) : 1;
  const int64_t multiple = config.integer_or("block_multiple_of", 256, 1, kMaxWidth);
  width = static_cast<int64_t>(factor * static_cast<double>(width));
  width = (width + multiple - 1) / multiple * multiple;
  if (width < 1 || width > kMaxWidth) {
    config.refuse(
        field, fmt::format("in [1, {}] when block_auto_adjust_ff_dim has adjusted it", kMaxWidth));
  }
  return width;
}

MoeParts read_moe(const JsonObject& config, const Weights& weights) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t experts = config.integer("num_experts", 1, kernels::kMaxExperts);
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  if (config.boolean_or("use_expert_bias", true)) {
    parts.choice_bias = weights.vector("expert_bias", {experts});
  }
  parts.routing.score = kernels::MoeScore::grouped_sigmoid;
  parts.routing.normalise = config.boolean_or("norm_topk_prob", true);
  parts.routing.sum_epsilon = 1e-6f;
  parts.routing.factor = static_cast<float>(read_positive(config, "routed_scaling_factor", 1));
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  parts.experts = weights.device().place(
      read_experts(weights, experts, hidden, read_size(config, "moe_intermediate_size"), kMlpNames),
      false);
  return parts;
}

// Reads the feed-forward block of a layer.
using ReadFeed = std::unique_ptr<Block> (*)(const JsonObject& config, const Weights& weights,
                                            int32_t layer);

std::unique_ptr<Block> read_mlp_of(const JsonObject& config, const Weights& weights,
                                   int64_t width) {
  return std::make_unique<Mlp>(
      read_mlp(weights, read_size(config, "hidden_size"), width, false, kMlpNames));
}

std::unique_ptr<Model> load(const JsonObject& config, Checkpoint checkpoint,
                            std::shared_ptr<ModelDevice> device, ReadFeed read_feed) {
  // The older name precedes the other one.
  constexpr std::string_view kTied = "tie_embedding";
  DecoderParts parts =
      read_decoder(config, std::move(checkpoint), std::move(device),
                   {.tied_embeddings = true,
                    .epsilon_field = kEpsilon,
                    .tied_field = config.has(kTied) ? kTied : DecoderDefaults{}.tied_field,
                    .final_norm = "model.embedding_norm"});
  const int32_t hidden = parts.info.hidden;
  AttentionSpec full = read_attention(config, {.kv_heads = 8});
  full.has_rope = rotates_in_backend(*parts.device);
  const AttentionSpec conv = read_conv_spec(config);
  const Rotary rotary = make_rotary(read_rope(config, full.head_dim, {.theta = 1e6}), parts);
  const std::vector<bool> is_conv = read_conv_layers(config);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const bool convolves = is_conv[static_cast<size_t>(i)];
    const AttentionSpec& spec = convolves ? conv : full;
    const LayerSlot slot = join_group(parts.info, i, shard_spec(spec, *parts.device));
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm_of(config, weights, "operator_norm", hidden);
    layer.mixer = convolves ? read_conv(config, weights["conv"], conv, slot)
                            : read_full_attention(config, weights["self_attn"], full, slot, rotary);
    layer.feed_norm = read_norm_of(config, weights, "ffn_norm", hidden);
    layer.feed = read_feed(config, weights["feed_forward"], i);
  }
  return make_decoder(std::move(parts));
}

}  // namespace

std::unique_ptr<Model> load_lfm2(const JsonObject& config, Checkpoint checkpoint,
                                 std::shared_ptr<ModelDevice> device) {
  return load(config, std::move(checkpoint), std::move(device),
              [](const JsonObject& fields, const Weights& weights, int32_t) {
                return read_mlp_of(fields, weights, read_width(fields));
              });
}

std::unique_ptr<Model> load_lfm2_moe(const JsonObject& config, Checkpoint checkpoint,
                                     std::shared_ptr<ModelDevice> device) {
  if (!config.has(kLayerTypes)) config.refuse(kLayerTypes, "set");
  return load(config, std::move(checkpoint), std::move(device),
              [](const JsonObject& fields, const Weights& weights, int32_t layer) {
                const int64_t dense =
                    fields.integer_or("num_dense_layers", 2, 0, read_layers(fields));
                if (layer >= dense) {
                  return std::unique_ptr<Block>(std::make_unique<Moe>(read_moe(fields, weights)));
                }
                return read_mlp_of(fields, weights, read_size(fields, "intermediate_size"));
              });
}

}  // namespace fovea
