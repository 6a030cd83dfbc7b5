// SPDX-License-Identifier: Apache-2.0
#include "fovea/pass_addresses.h"

#include <algorithm>
#include <utility>

#include "attention/batch_arrays.h"
#include "core/check.h"

namespace fovea {

void PassAddresses::add(std::string array, const void* address) {
  entries_.push_back({std::move(array), address});
}

void PassAddresses::add(std::initializer_list<Array> arrays, std::string_view whose) {
  for (const auto& [name, address] : arrays) add(fmt::format("{}{}", name, whose), address);
}

void PassAddresses::add(const BatchView& batch) {
  for_each_array(batch, [this](const BatchArray& array) {
    if (!array.on_host) add(std::string(array.name), array.data);
  });
  add({{"table", batch.table.entries}, {"cross.table", batch.cross.table.entries}}, {});
}

void PassAddresses::add(const LayerTensors& layer) {
  add({{"q", layer.q.data},
       {"mla.q_rope", layer.mla.q_rope.data},
       {"dual_chunk.q_succ", layer.dual_chunk.q_succ.data},
       {"dual_chunk.q_inter", layer.dual_chunk.q_inter.data},
       {"new k", layer.k.data},
       {"new v", layer.v.data},
       {"out", layer.out.data},
       {"lse", layer.lse.data},
       {"q_scale", layer.q_scale.data},
       {"scores.sinks", layer.scores.sinks},
       {"scores.alibi_slopes", layer.scores.alibi_slopes},
       {"rotary.cos", layer.rotary.cos},
       {"rotary.sin", layer.rotary.sin},
       {"rotary.positions", layer.rotary.positions},
       {"rotary.q_norm.weight", layer.rotary.q_norm.weight},
       {"rotary.k_norm.weight", layer.rotary.k_norm.weight},
       {"mla.latent", layer.mla.latent.data},
       {"mla.k_rope", layer.mla.k_rope.data},
       {"mla.weights.w_uk", layer.mla.weights.w_uk},
       {"mla.weights.w_uv", layer.mla.weights.w_uv},
       {"linear.mixed", layer.linear.mixed},
       {"linear.conv_weight", layer.linear.conv_weight},
       {"linear.conv_bias", layer.linear.conv_bias},
       {"linear.log_decay", layer.linear.log_decay},
       {"linear.beta", layer.linear.beta},
       {"linear.skip", layer.linear.skip}},
      fmt::format(" of layer {}", layer.layer));
}

void PassAddresses::add(const KvPool& pool, std::string_view whose) {
  add({{"the slot map", pool.device_slot_map()}}, whose);
  for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
    const KvLayerView cache = pool.layer(layer);
    add({{"k", cache.k}, {"v", cache.v}, {"k_scale", cache.k_scale}, {"v_scale", cache.v_scale}},
        fmt::format(" of layer {}{}", layer, whose));
  }
}

void PassAddresses::add(const StatePool& pool, std::string_view whose) {
  add({{"the marks of states", pool.marks()}}, whose);
  for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
    const StateLayerView view = pool.layer(layer);
    add({{"states", view.state}, {"windows of states", view.conv}, {"drafts", view.drafts}},
        fmt::format(" of layer {}{}", layer, whose));
  }
}

void PassAddresses::check(const PassAddresses& now) const {
  for (size_t i = 0; i < std::max(entries_.size(), now.entries_.size()); ++i) {
    const Entry was = i < entries_.size() ? entries_[i] : Entry{now.entries_[i].array, nullptr};
    const bool listed = i < now.entries_.size() && now.entries_[i].array == was.array;
    const void* const address = listed ? now.entries_[i].address : nullptr;
    check_argument(address == was.address, "{} is at {}, the pass was captured with it at {}",
                   was.array, address, was.address);
  }
}

}  // namespace fovea
