// SPDX-License-Identifier: Apache-2.0
// The groups of layers with equal specs.
#include <algorithm>

#include "model/decoder.h"

namespace fovea {
namespace {

StateCacheSpec state_of(const AttentionSpec& spec) {
  const LinearSpec& linear = spec.linear;
  StateCacheSpec state{.conv_dim = conv_dim_of(spec), .conv_width = linear.conv_width};
  if (spec.kind == AttentionKind::short_conv) return state;
  state.heads = linear.value_heads;
  state.rows = linear.value_dim;
  state.columns = linear.key_dim;
  return state;
}

}  // namespace

LayerSlot join_group(ModelInfo& info, int32_t layer, const AttentionSpec& spec) {
  auto group = std::find_if(info.groups.begin(), info.groups.end(),
                            [&](const LayerGroup& g) { return g.spec == spec; });
  if (group == info.groups.end()) {
    group = info.groups.insert(group, LayerGroup{spec, {}, {}});
    if (is_linear(spec.kind)) group->state = state_of(spec);
  }
  group->layers.push_back(layer);
  if (is_linear(spec.kind)) group->state.layers = static_cast<int32_t>(group->layers.size());
  return {static_cast<int32_t>(group - info.groups.begin()),
          static_cast<int32_t>(group->layers.size()) - 1};
}

}  // namespace fovea
