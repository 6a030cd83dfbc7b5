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
  Linear selection;                    // from the convolution to [steps of low rank | B, C]
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

    // All channels of a token choose its B, C and steps, so ranks add what theirs choose.
    const int32_t rank = parts_.dt.k, vectors = parts_.selection.n - rank;
    device.silu_gate(scratch.mixed, {}, scratch.convolved, pass.rows, channels);
    device.linear(parts_.selection, scratch.convolved, scratch.selected, pass.rows);
    if (device.ranks() != nullptr) {
      device.sum_over_ranks(scratch.selected.floats(), pass.rows * parts_.selection.n);
    }
    device.store_rows(from_column(scratch.selected, rank), from_column(scratch.mixed, channels),
                      nullptr, pass.rows, vectors);
    device.silu_gate(scratch.selected, {}, scratch.steps, pass.rows, rank);
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
    device.part_linear(parts_.out, scratch.convolved, out, pass.rows);
  }

 private:
  // x: the input of the convolution, later the scan's results. mixed: convolved x, B, C.
  struct Buffers {
    Rows x, z, mixed, selected, dt;  // f32
    Rows convolved, steps;
  };
  Buffers buffers(Arena& arena, int64_t rows) const {
    return {.x = arena.float_rows(rows, parts_.channels()),
            .z = arena.float_rows(rows, parts_.channels()),
            .mixed = arena.float_rows(rows, parts_.spec.linear.conv_dim()),
            .selected = arena.float_rows(rows, parts_.selection.n),
            .dt = arena.float_rows(rows, parts_.channels()),
            .convolved = arena.rows(rows, parts_.channels()),
            .steps = arena.rows(rows, parts_.dt.k)};
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

// Keeps the channels of the device's rank.
void shard(MambaParts& parts, const Linear& in, ModelDevice& device) {
  const RankOf rank(device);
  const int64_t all = parts.channels(), states = parts.spec.linear.key_dim;
  const ShardRange channels = rank.range(all);
  parts.in_x = outputs_of(in, channels);
  parts.in_z = outputs_of(in, {all + channels.begin, channels.count});
  if (rank.alone()) return;
  parts.in_x = device.place_part(parts.in_x);
  parts.in_z = device.place_part(parts.in_z);
  const auto rows_of_channels = [&](std::span<const float> values, int64_t width) {
    return values_of(values, {channels.begin * width, channels.count * width});
  };
  parts.conv_weight = rows_of_channels(parts.conv_weight, parts.spec.linear.conv_width);
  if (!parts.conv_bias.empty()) parts.conv_bias = values_of(parts.conv_bias, channels);
  parts.selection = device.place_part(inputs_of(parts.selection, channels, rank));
  parts.dt = device.place_part(outputs_of(parts.dt, channels));
  parts.a = rows_of_channels(parts.a, states);
  parts.skip = values_of(parts.skip, channels);
  parts.out = device.place_part(inputs_of(parts.out, channels, rank));
  parts.spec = shard_spec(parts.spec, device);
}

std::unique_ptr<Block> read_mixer(const JsonObject& config, const Weights& weights,
                                  const AttentionSpec& spec, LayerSlot slot) {
  MambaParts parts;
  parts.spec = spec;
  parts.slot = slot;
  const int64_t hidden = read_size(config, "hidden_size"), channels = parts.channels();
  const int64_t rank = read_step_rank(config, channels), states = spec.linear.key_dim;
  const bool has_bias = config.boolean_or("use_bias", false);
  const Linear in = weights.located("in_proj", 2 * channels, hidden, has_bias);
  parts.conv_weight = weights["conv1d"].vector("weight", {channels, 1, spec.linear.conv_width});
  if (config.boolean_or("use_conv_bias", true)) {
    parts.conv_bias = weights["conv1d"].vector("bias", {channels});
  }
  parts.selection = weights.located("x_proj", rank + 2 * states, channels);
  parts.dt = weights.located("dt_proj", channels, rank, true);
  parts.a = read_a(weights, spec);
  parts.skip = weights.vector("D", {channels});
  parts.out = weights.located("out_proj", hidden, channels, has_bias);
  shard(parts, in, weights.device());
  return std::make_unique<MambaMixer>(std::move(parts));
}

}  // namespace

std::unique_ptr<Model> load_mamba(const JsonObject& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  constexpr std::string_view kEpsilon = "layer_norm_epsilon";
  require_text(config, "hidden_act", "silu");
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
    const LayerSlot slot = join_group(parts.info, i, shard_spec(spec, *parts.device));
    layer.mixer = read_mixer(config, weights["mixer"], spec, slot);
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
