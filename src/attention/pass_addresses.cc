// SPDX-License-Identifier: Apache-2.0
#include "fovea/pass_addresses.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace fovea {

void PassAddresses::add(std::string array, const void* address) {
  entries_.push_back({std::move(array), address});
}

void PassAddresses::add(std::initializer_list<Array> arrays, std::string_view whose) {
  for (const auto& [name, address] : arrays) add(fmt::format("{}{}", name, whose), address);
}

void PassAddresses::add(const BatchView& batch) {
  add({{"q_indptr", batch.q_indptr},
       {"kv_lens", batch.kv_lens},
       {"request_rows", batch.request_rows},
       {"request_slots", batch.request_slots},
       {"page_table", batch.page_table},
       {"out_slots", batch.out_slots},
       {"positions", batch.positions},
       {"shared_prefix", batch.shared_prefix},
       {"encoder_lens", batch.encoder_lens},
       {"encoder_slots", batch.encoder_slots},
       {"encoder_page_table", batch.encoder_page_table},
       {"tree_mask", batch.tree_mask},
       {"custom_mask", batch.custom_mask},
       {"custom_mask_indptr", batch.custom_mask_indptr},
       {"spans", batch.spans},
       {"span_indptr", batch.span_indptr},
       {"item_prefix_lens", batch.item_prefix_lens},
       {"token_pos_in_items", batch.token_pos_in_items},
       {"state_slots", batch.state_slots},
       {"snapshot_slots", batch.snapshot_slots}},
      {});
}

void PassAddresses::add(const LayerTensors& layer) {
  add({{"q", layer.q.data},
       {"q_rope", layer.q_rope.data},
       {"q_succ", layer.q_succ.data},
       {"q_inter", layer.q_inter.data},
       {"new k", layer.k.data},
       {"new v", layer.v.data},
       {"out", layer.out.data},
       {"lse", layer.lse.data},
       {"q_scale", layer.q_scale},
       {"sinks", layer.sinks},
       {"alibi_slopes", layer.alibi_slopes},
       {"rotary.cos", layer.rotary.cos},
       {"rotary.sin", layer.rotary.sin},
       {"rotary.positions", layer.rotary.positions},
       {"mla_weights.w_uk", layer.mla_weights.w_uk},
       {"mla_weights.w_uv", layer.mla_weights.w_uv},
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
