// SPDX-License-Identifier: Apache-2.0
// Reads which layers of a plain decoder have windows, positions and mixtures of experts.
#include <algorithm>

#include "core/check.h"
#include "model/plain_decoder.h"

namespace fovea {
namespace {

// Returns the window size of layers that have one, or nullopt if no layer does.
std::optional<int32_t> window_of(const Windows& windows, const JsonObject& config) {
  if (windows.has_switch && !config.boolean_or("use_sliding_window", false)) return std::nullopt;
  return read_window(config,
                     windows.default_size > 0 ? std::optional(windows.default_size) : std::nullopt);
}

// Returns the layer types for a config without `layer_types`.
std::vector<std::string_view> default_types(const Windows& windows, const JsonObject& config,
                                            const std::vector<PlainLayer>& layers) {
  std::vector<std::string_view> types(layers.size(), kFullAttention);
  int64_t first = 0, period = windows.period;
  if (windows.where == Windows::Where::upper_layers) {
    first = config.integer_or("max_window_layers", 28, 0, 1 << 20);
  } else if (!windows.period_field.empty()) {
    period = config.integer_or(windows.period_field, period, 1, 1 << 20);
  }
  for (size_t i = 0; i < types.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    const bool slides = windows.where == Windows::Where::between        ? (layer + 1) % period != 0
                        : windows.where == Windows::Where::upper_layers ? layer >= first
                                                                        : !layers[i].rotates;
    if (slides) types[i] = kSlidingAttention;
  }
  return types;
}

}  // namespace

std::vector<PlainLayer> read_plain_layers(const PlainDecoder& decoder, const JsonObject& config) {
  const Windows& windows = decoder.windows;
  std::vector<PlainLayer> layers(static_cast<size_t>(read_layers(config)));
  if (decoder.skips_rope) {
    const std::vector<bool> has_rope = read_rope_layers(config);
    for (size_t i = 0; i < layers.size(); ++i) layers[i].rotates = has_rope[i];
  }
  if (windows.where == Windows::Where::nowhere) return layers;
  const std::optional<int32_t> window = window_of(windows, config);
  if (windows.where == Windows::Where::everywhere) {
    for (PlainLayer& layer : layers) layer.window = window.value_or(0);
    return layers;
  }
  std::vector<std::string_view> usual(layers.size(), kFullAttention);
  if (window || windows.where == Windows::Where::between) {
    usual = default_types(windows, config, layers);
  }
  const auto types = read_layer_types(config, {kFullAttention, kSlidingAttention}, usual);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (types[i] != kSlidingAttention) continue;
    if (window) {
      layers[i].window = *window;
    } else if (windows.has_switch && !config.boolean_or("use_sliding_window", false)) {
      config.refuse("use_sliding_window", "true, as layer_types holds sliding_attention");
    } else {
      config.refuse("sliding_window", "set, as some layers are sliding_attention");
    }
  }
  return layers;
}

std::vector<bool> read_rope_layers(const JsonObject& config) {
  const int32_t layers = read_layers(config);
  std::vector<bool> has_rope;
  if (!config.has("no_rope_layers") || config.integers("no_rope_layers", 0, 1).empty()) {
    const int64_t interval = config.integer_or("no_rope_layer_interval", 4, 1, 1 << 20);
    for (int32_t i = 0; i < layers; ++i) has_rope.push_back((i + 1) % interval != 0);
    return has_rope;
  }
  for (const int64_t rotates : config.integers("no_rope_layers", 0, 1)) {
    has_rope.push_back(rotates != 0);
  }
  if (has_rope.size() != static_cast<size_t>(layers)) {
    config.refuse("no_rope_layers", fmt::format("an array of {}", layers));
  }
  return has_rope;
}

bool is_dense_layer(const JsonObject& config, int32_t layer) {
  const int64_t step = config.integer_or("decoder_sparse_step", 1, 1, 1 << 20);
  if ((layer + 1) % step != 0) return true;
  if (!config.has("mlp_only_layers")) return false;
  const auto dense = config.integers("mlp_only_layers", 0, 1 << 20);
  return std::ranges::find(dense, layer) != dense.end();
}

}  // namespace fovea
