// SPDX-License-Identifier: Apache-2.0
// Mamba (arXiv:2312.00752). Every layer is a selective scan behind a causal convolution, without a
// feed-forward block; nothing depends on positions.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/architectures.h"
#include "model/from_config.h"
#include "model/shard.h"

namespace fovea {
namespace {

struct MambaParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear in_x, in_z;
  std::span<const float> conv_weight;  // [channels, conv_width]
  std::span<const float> conv_bias;    // [channels] or empty
  Linear steps, vectors;               // from the convolution to steps of low rank; to B and C
  Linear dt;                           // from steps of low rank
  std::span<const float> a;            // [channels, states]
  std::span<const float> skip;         // [channels]
  Linear out;

  int32_t channels() const { return spec.linear.value_heads; }
};

class MambaMixer : public Block {
 public:
  explicit MambaMixer(MambaParts parts) : parts_(std::move(parts)) {}

  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

  void forward(Pass& pass, Rows x, Rows out) const override {
    const Buffers scratch = buffers(pass.arena, pass.rows);
    const int32_t channels = parts_.channels();
    ModelDevice& device = *pass.device;
    AttentionBackend& backend = *pass.backends[static_cast<size_t>(parts_.slot.group)];
    device.linear(parts_.in_x, x, scratch.x, pass.rows);
    device.linear(parts_.in_z, x, scratch.z, pass.rows);

    LayerTensors convolution;
    convolution.layer = parts_.slot.layer;
    convolution.linear.mixed = scratch.x.floats();
    convolution.linear.conv_weight = parts_.conv_weight.data();
    if (!parts_.conv_bias.empty()) convolution.linear.conv_bias = parts_.conv_bias.data();
    convolution.out = as_heads(scratch.mixed, 1);
    backend.forward(convolution, device.stream());

    device.silu_gate(scratch.mixed, {}, scratch.convolved, pass.rows, channels);
    device.linear(parts_.vectors, scratch.convolved, from_column(scratch.mixed, channels),
                  pass.rows);
    device.linear(parts_.steps, scratch.convolved, scratch.steps, pass.rows);
    device.linear(parts_.dt, scratch.steps, scratch.dt, pass.rows);
    device.softplus(scratch.dt.floats(), pass.rows * channels);

    LayerTensors scan;
    scan.layer = parts_.slot.layer;
    scan.linear.mixed = scratch.mixed.floats();
    scan.linear.log_decay = parts_.a.data();
    scan.linear.beta = scratch.dt.floats();
    scan.linear.skip = parts_.skip.data();
    scan.out = as_heads(scratch.x, 1);
    backend.forward(scan, device.stream());

    device.silu_gate(scratch.x, scratch.z, scratch.convolved, pass.rows, channels);
    device.linear(parts_.out, scratch.convolved, out, pass.rows);
  }

 private:
  // x: the input of the convolution, later the scan's results. mixed: convolved x, B, C.
  struct Buffers {
    Rows x, z, mixed, dt;  // f32
    Rows convolved, steps;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    return {.x = arena.float_rows(rows, parts_.channels()),
            .z = arena.float_rows(rows, parts_.channels()),
            .mixed = arena.float_rows(rows, parts_.spec.linear.conv_dim()),
            .dt = arena.float_rows(rows, parts_.channels()),
            .convolved = arena.rows(rows, parts_.channels()),
            .steps = arena.rows(rows, parts_.steps.n)};
  }

  MambaParts parts_;
};

AttentionSpec read_scan_spec(const JsonObject& config) {
  constexpr int64_t kMaxExpand = 64;
  const int64_t channels =
      config.integer_or("expand", 2, 1, kMaxExpand) * read_size(config, "hidden_size");
  if (config.has("intermediate_size") && read_size(config, "intermediate_size") != channels) {
    config.refuse("intermediate_size", fmt::format("expand * hidden_size, {}", channels));
  }
  AttentionSpec spec;
  spec.kind = AttentionKind::mamba1;
  spec.linear.key_heads = spec.linear.value_dim = 1;
  spec.linear.value_heads = static_cast<int32_t>(channels);
  spec.linear.key_dim = static_cast<int32_t>(config.integer_or("state_size", 16, 1, 1024));
  spec.linear.conv_width = static_cast<int32_t>(config.integer_or("conv_kernel", 4, 1, 64));
  return spec;
}

// Reads `time_step_rank`, a number or "auto".
int64_t read_step_rank(const JsonObject& config, int64_t channels) {
  constexpr std::string_view kField = "time_step_rank";
  if (config.has(kField) && !config.value(kField).is_string()) {
    return config.integer(kField, 1, channels);
  }
  require_text(config, kField, "auto");
  constexpr int64_t kValuesOfAStep = 16;
  return (int64_t{read_size(config, "hidden_size")} + kValuesOfAStep - 1) / kValuesOfAStep;
}

// Returns -e^A_log.
std::span<const float> read_a(const Weights& weights, const AttentionSpec& spec) {
  std::vector<float> a = weights.device().read(
      weights.vector("A_log", {spec.linear.value_heads, spec.linear.key_dim}));
  for (float& value : a) value = -std::exp(value);
  return weights.device().place(std::move(a));
}

std::unique_ptr<Block> read_mixer(const JsonObject& config, const Weights& weights,
                                  const AttentionSpec& spec, LayerSlot slot) {
  MambaParts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t hidden = read_size(config, "hidden_size"), channels = parts.channels();
  const int64_t rank = read_step_rank(config, channels), states = spec.linear.key_dim;
  const bool has_bias = config.boolean_or("use_bias", false);
  const Linear in = weights.linear("in_proj", 2 * channels, hidden, has_bias);
  parts.in_x = outputs_of(in, {0, channels});
  parts.in_z = outputs_of(in, {channels, channels});
  parts.conv_weight = weights["conv1d"].vector("weight", {channels, 1, spec.linear.conv_width});
  if (config.boolean_or("use_conv_bias", true)) {
    parts.conv_bias = weights["conv1d"].vector("bias", {channels});
  }
  const Linear x = weights.linear("x_proj", rank + 2 * states, channels);
  parts.steps = outputs_of(x, {0, rank});
  parts.vectors = outputs_of(x, {rank, 2 * states});
  parts.dt = weights.linear("dt_proj", channels, rank, true);
  parts.a = read_a(weights, spec);
  parts.skip = weights.vector("D", {channels});
  parts.out = weights.linear("out_proj", hidden, channels, has_bias);
  return std::make_unique<MambaMixer>(std::move(parts));
}

}  // namespace

std::unique_ptr<Model> load_mamba(const JsonObject& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  constexpr std::string_view kEpsilon = "layer_norm_epsilon";
  require_text(config, "hidden_act", "silu");
  if (const RankOf rank(*device); !rank.alone()) {
    fail(ErrorCode::unsupported, "Mamba layers cannot be divided among {} ranks", rank.size);
  }
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device),
                                    {.tied_embeddings = true,
                                     .context_field = {},
                                     .epsilon_field = kEpsilon,
                                     .embedding = "backbone.embeddings",
                                     .final_norm = "backbone.norm_f"});
  const AttentionSpec spec = read_scan_spec(config);
  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["backbone.layers"][i];
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = {
        .weight = weights["norm"].vector("weight", {parts.info.hidden}, InitialValues::constant(1)),
        .epsilon = read_epsilon(config, kEpsilon)};
    layer.mixer = read_mixer(config, weights["mixer"], spec, join_group(parts.info, i, spec));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
