// SPDX-License-Identifier: Apache-2.0
// Granite 4 without experts. Most layers are Mamba2 (arXiv:2405.21060), a linear attention with a
// recurrent state; the others are softmax attention, usually without positions. Multipliers are
// those of Granite.
#include <array>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/quote.h"
#include "model/architectures.h"
#include "model/from_config.h"
#include "model/read_rope.h"
#include "model/shard.h"

namespace fovea {
namespace {

struct Mamba2Parts {
  AttentionSpec spec;
  LayerSlot slot;
  std::vector<Linear> in;              // [z | x, B, C | dt], one matrix or several
  std::span<const float> conv_weight;  // [conv_dim, conv_width]
  std::span<const float> conv_bias;    // [conv_dim] or empty
  std::span<const float> a_log, dt_bias, skip;
  float dt_min = 0, dt_max = 0;
  Norm norm;  // normalises each group of values after they are multiplied by silu(z)
  bool divides_group = false;  // each rank has a part of the one group
  Linear out;

  int32_t values() const { return spec.linear.value_heads * spec.linear.value_dim; }
  int64_t projected() const {
    return int64_t{values()} + spec.linear.conv_dim() + spec.linear.value_heads;
  }
};

class Mamba2 : public Block {
 public:
  explicit Mamba2(Mamba2Parts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const LinearSpec& linear = parts_.spec.linear;
    const Buffers scratch = buffers(pass.arena, pass.rows);
    ModelDevice& device = *pass.device;
    int64_t column = 0;
    for (const Linear& in : parts_.in) {
      device.linear(in, x, from_column(scratch.projected, column), pass.rows);
      column += in.n;
    }

    kernels::Mamba2InputsParams inputs;
    inputs.projected = scratch.projected.floats();
    inputs.a_log = parts_.a_log.data();
    inputs.dt_bias = parts_.dt_bias.data();
    inputs.dt_min = parts_.dt_min;
    inputs.dt_max = parts_.dt_max;
    inputs.z = scratch.z;
    inputs.mixed = scratch.mixed;
    inputs.log_decay = scratch.log_decay;
    inputs.dt = scratch.dt;
    inputs.rows = pass.rows;
    inputs.values = parts_.values();
    inputs.conv_dim = linear.conv_dim();
    inputs.heads = linear.value_heads;
    device.mamba2_inputs(inputs);

    LayerTensors tensors;
    tensors.layer = parts_.slot.layer;
    tensors.linear.mixed = scratch.mixed;
    tensors.linear.conv_weight = parts_.conv_weight.data();
    if (!parts_.conv_bias.empty()) tensors.linear.conv_bias = parts_.conv_bias.data();
    tensors.linear.log_decay = scratch.log_decay;
    tensors.linear.beta = scratch.dt;
    tensors.linear.skip = parts_.skip.data();
    tensors.out = dense_rows(scratch.out, DType::f32, linear.value_heads, linear.value_dim);
    pass.backends[static_cast<size_t>(parts_.slot.group)]->forward(tensors, device.stream());

    norm_values(pass, scratch);
    device.part_linear(parts_.out, scratch.normed, out, pass.rows);
  }

 private:
  // mixed: x, B and C, the input of the convolution. z: gates of the results.
  struct Buffers {
    Rows projected;
    float *mixed, *z, *log_decay, *dt, *out;
    Rows normed;
    float* squares;  // sums for a group that is divided
  };
  void norm_values(const Pass& pass, const Buffers& scratch) const {
    ModelDevice& device = *pass.device;
    const Rows result{scratch.out, parts_.values(), DType::f32};
    const Rows gate{scratch.z, parts_.values(), DType::f32};
    if (parts_.divides_group) {
      return norm_over_ranks(device, std::array{DividedNorm{.norm = parts_.norm,
                                                            .x = result,
                                                            .gate = gate,
                                                            .out = scratch.normed,
                                                            .squares = scratch.squares,
                                                            .rows = pass.rows,
                                                            .parts = device.ranks()->size()}});
    }
    const int32_t groups = parts_.spec.linear.key_heads, width = parts_.values() / groups;
    device.gated_norm({parts_.norm, kernels::NormGate::silu_before}, as_heads(result, width),
                      as_heads(gate, width), as_heads(scratch.normed, width), pass.rows, groups);
  }
  Buffers buffers(Arena& arena, int64_t rows) const {
    const LinearSpec& linear = parts_.spec.linear;
    return {.projected = arena.float_rows(rows, parts_.projected()),
            .mixed = arena.floats(rows * linear.conv_dim()),
            .z = arena.floats(rows * parts_.values()),
            .log_decay = arena.floats(rows * linear.value_heads),
            .dt = arena.floats(rows * linear.value_heads),
            .out = arena.floats(rows * parts_.values()),
            .normed = arena.rows(rows, parts_.values()),
            .squares = parts_.divides_group ? arena.floats(rows) : nullptr};
  }

  Mamba2Parts parts_;
};

AttentionSpec read_mamba2_spec(const JsonObject& config) {
  constexpr int64_t kMaxExpand = 64;
  AttentionSpec spec;
  spec.kind = AttentionKind::mamba2;
  spec.linear.key_heads = static_cast<int32_t>(config.integer_or("mamba_n_groups", 1, 1, 1 << 16));
  spec.linear.value_heads =
      static_cast<int32_t>(config.integer_or("mamba_n_heads", 128, 1, 1 << 16));
  spec.linear.key_dim = static_cast<int32_t>(config.integer_or("mamba_d_state", 256, 1, 1024));
  spec.linear.conv_width = static_cast<int32_t>(config.integer_or("mamba_d_conv", 4, 1, 64));
  const int64_t values =
      config.integer_or("mamba_expand", 2, 1, kMaxExpand) * read_size(config, "hidden_size");
  const int64_t heads = spec.linear.value_heads;
  if (values % heads != 0) {
    config.refuse("mamba_n_heads",
                  fmt::format("a divisor of mamba_expand * hidden_size, {}", values));
  }
  if (heads % spec.linear.key_heads != 0) {
    config.refuse("mamba_n_heads",
                  fmt::format("a multiple of mamba_n_groups, {}", spec.linear.key_heads));
  }
  spec.linear.value_dim = static_cast<int32_t>(values / heads);
  const bool automatic = !config.has("mamba_d_head") || config.value("mamba_d_head").is_string();
  if (automatic) {
    require_text(config, "mamba_d_head", "auto");
  } else if (config.integer("mamba_d_head", 1, values) != spec.linear.value_dim) {
    config.refuse("mamba_d_head", fmt::format("mamba_expand * hidden_size / mamba_n_heads, {}",
                                              spec.linear.value_dim));
  }
  return spec;
}

// Reads `time_step_limit`, a pair of bounds; without it there are none.
void read_time_step_limit(const JsonObject& config, Mamba2Parts& parts) {
  constexpr std::string_view kField = "time_step_limit";
  parts.dt_max = std::numeric_limits<float>::infinity();
  if (!config.has(kField)) return;
  const std::vector<double> limits = config.numbers(kField, 0, 1e9);
  if (limits.size() != 2 || limits[0] > limits[1]) {
    config.refuse(kField, "an array of two numbers, the smaller one first");
  }
  parts.dt_min = static_cast<float>(limits[0]);
  parts.dt_max = static_cast<float>(limits[1]);
}

// Keeps the value heads of the device's rank, and their groups.
void shard(Mamba2Parts& parts, const Linear& in, ModelDevice& device) {
  const RankOf rank(device);
  const LinearSpec& linear = parts.spec.linear;
  const int64_t all = parts.values(), keys = int64_t{linear.key_heads} * linear.key_dim;
  const ShardRange values = rank.range(all), heads = rank.range(linear.value_heads);
  const ShardRange groups = linear.key_heads > 1 ? rank.range(keys) : ShardRange{0, keys};
  const auto behind = [](ShardRange range, int64_t first) {
    range.begin += first;
    return range;
  };
  const ShardRange b = behind(groups, all), c = behind(groups, all + keys);
  parts.in = join_outputs(in,
                          {values, behind(values, all), behind(b, all), behind(c, all),
                           behind(heads, 2 * (all + keys))},
                          device);
  if (rank.alone()) return;
  parts.divides_group = linear.key_heads == 1;
  parts.conv_weight = rows_of(parts.conv_weight, linear.conv_width, {values, b, c}, device);
  if (!parts.conv_bias.empty()) {
    parts.conv_bias = rows_of(parts.conv_bias, 1, {values, b, c}, device);
  }
  parts.a_log = values_of(parts.a_log, heads);
  parts.dt_bias = values_of(parts.dt_bias, heads);
  parts.skip = values_of(parts.skip, heads);
  parts.norm.weight = values_of(parts.norm.weight, values);
  parts.out = device.place_part(inputs_of(parts.out, values, rank));
  parts.spec = shard_spec(parts.spec, device);
}

std::unique_ptr<Block> read_mamba2(const JsonObject& config, const Weights& weights,
                                   const AttentionSpec& spec, LayerSlot slot) {
  const int64_t hidden = read_size(config, "hidden_size"), heads = spec.linear.value_heads;
  const int64_t conv_dim = spec.linear.conv_dim();
  const bool has_bias = config.boolean_or("mamba_proj_bias", false);
  Mamba2Parts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t values = parts.values();
  const Linear in = weights.located("in_proj", values + conv_dim + heads, hidden, has_bias);
  parts.conv_weight = weights["conv1d"].vector("weight", {conv_dim, 1, spec.linear.conv_width});
  if (config.boolean_or("mamba_conv_bias", true)) {
    parts.conv_bias = weights["conv1d"].vector("bias", {conv_dim});
  }
  parts.a_log = weights.vector("A_log", {heads});
  parts.dt_bias = weights.vector("dt_bias", {heads});
  parts.skip = weights.vector("D", {heads});
  read_time_step_limit(config, parts);
  parts.norm = read_norm(config, weights, "norm", values);
  parts.out = weights.located("out_proj", hidden, values, has_bias);
  shard(parts, in, weights.device());
  return std::make_unique<Mamba2>(std::move(parts));
}

AttentionSpec read_softmax_attention(const JsonObject& config) {
  AttentionSpec spec = read_attention(config);
  spec.scores.softmax_scale = static_cast<float>(read_positive(config, "attention_multiplier", 1));
  return spec;
}

// Reads `position_embedding_type`: "rope", or "nope" or null for none.
Rotary read_positions(const JsonObject& config, const AttentionSpec& spec, DecoderParts& parts) {
  const std::string type = config.text_or("position_embedding_type", "nope");
  if (type == "rope") return make_rotary(read_rope(config, spec.head_dim, {}), parts);
  if (type != "nope") {
    fail(ErrorCode::unsupported,
         "position_embedding_type is {}; supported are \"rope\" and \"nope\"", quote(type));
  }
  return {};
}

void refuse_unsupported(const JsonObject& config) {
  require_text(config, "hidden_act", "silu");
  const int64_t experts = config.integer_or("num_local_experts", 8, 0, kernels::kMaxExperts);
  if (experts != 0) {
    fail(ErrorCode::unsupported, "num_local_experts is {}; supported is 0", experts);
  }
}

}  // namespace

std::unique_ptr<Model> load_granite_hybrid(const JsonObject& config, Checkpoint checkpoint,
                                           std::shared_ptr<ModelDevice> device) {
  // Configs name the layers in one of two ways.
  constexpr std::string_view kMamba = "mamba", kLinear = "linear_attention";
  constexpr std::string_view kAttention = "attention";
  refuse_unsupported(config);
  DecoderParts parts = read_decoder(
      config, std::move(checkpoint), std::move(device),
      {.logit_factor = static_cast<float>(1 / read_positive(config, "logits_scaling", 1))});
  parts.embedding_factor = static_cast<float>(read_positive(config, "embedding_multiplier", 1));
  parts.branch_factor = static_cast<float>(read_positive(config, "residual_multiplier", 1));
  const int32_t hidden = parts.info.hidden;
  const AttentionSpec full = read_softmax_attention(config), mamba2 = read_mamba2_spec(config);
  const Rotary rotary = read_positions(config, full, parts);
  const int32_t width = read_size(config, "shared_intermediate_size");
  const std::vector<std::string_view> pattern = {kLinear};
  const auto types =
      read_layer_types(config, {kMamba, kAttention, kLinear, kFullAttention}, pattern);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const std::string& type = types[static_cast<size_t>(i)];
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    if (type == kMamba || type == kLinear) {
      const LayerSlot slot = join_group(parts.info, i, shard_spec(mamba2, *parts.device));
      layer.mixer = read_mamba2(config, weights["mamba"], mamba2, slot);
    } else {
      SelfAttentionParts attention = read_self_attention(config, weights["self_attn"], full);
      attention.slot = join_group(parts.info, i, shard_spec(full, *parts.device));
      if (rotary) attention.prepare_heads({}, {}, rotary);
      shard(attention, *parts.device);
      layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    }
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = std::make_unique<Mlp>(
        read_mlp(weights["shared_mlp"], hidden, width, false,
                 {.gate = "input_linear", .up = {}, .down = "output_linear"}));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
