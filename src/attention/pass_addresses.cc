// SPDX-License-Identifier: Apache-2.0
#include "fovea/pass_addresses.h"

#include <utility>

#include "core/check.h"

namespace fovea {

void PassAddresses::add(std::string array, const void* address) {
  entries_.push_back({std::move(array), address});
}

void PassAddresses::add(const BatchView& batch) {
  add("q_indptr", batch.q_indptr);
  add("kv_lens", batch.kv_lens);
  add("request_rows", batch.request_rows);
  add("request_slots", batch.request_slots);
  add("page_table", batch.page_table);
  add("out_slots", batch.out_slots);
  add("positions", batch.positions);
  add("shared_prefix", batch.shared_prefix);
  add("encoder_lens", batch.encoder_lens);
  add("encoder_slots", batch.encoder_slots);
  add("encoder_page_table", batch.encoder_page_table);
  add("tree_mask", batch.tree_mask);
  add("custom_mask", batch.custom_mask);
  add("custom_mask_indptr", batch.custom_mask_indptr);
  add("spans", batch.spans);
  add("span_indptr", batch.span_indptr);
  add("item_prefix_lens", batch.item_prefix_lens);
  add("token_pos_in_items", batch.token_pos_in_items);
  add("state_slots", batch.state_slots);
  add("snapshot_slots", batch.snapshot_slots);
}

void PassAddresses::add(const LayerTensors& layer) {
  const auto note = [&](const char* array, const void* address) {
    add(fmt::format("{} of layer {}", array, layer.layer), address);
  };
  note("q", layer.q.data);
  note("q_rope", layer.q_rope.data);
  note("new k", layer.k.data);
  note("new v", layer.v.data);
  note("out", layer.out.data);
  note("lse", layer.lse.data);
  note("q_scale", layer.q_scale);
  note("sinks", layer.sinks);
  note("alibi_slopes", layer.alibi_slopes);
  note("rotary.cos", layer.rotary.cos);
  note("rotary.sin", layer.rotary.sin);
  note("rotary.positions", layer.rotary.positions);
  note("mla_weights.w_uk", layer.mla_weights.w_uk);
  note("mla_weights.w_uv", layer.mla_weights.w_uv);
  note("linear.mixed", layer.linear.mixed);
  note("linear.conv_weight", layer.linear.conv_weight);
  note("linear.conv_bias", layer.linear.conv_bias);
  note("linear.log_decay", layer.linear.log_decay);
  note("linear.beta", layer.linear.beta);
  note("linear.skip", layer.linear.skip);
}

void PassAddresses::add(const KvPool& pool, std::string_view whose) {
  add(fmt::format("the slot map{}", whose), pool.device_slot_map());
  for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
    const KvLayerView cache = pool.layer(layer);
    const auto note = [&](const char* array, const void* address) {
      add(fmt::format("{} of layer {}{}", array, layer, whose), address);
    };
    note("k", cache.k);
    note("v", cache.v);
    note("k_scale", cache.k_scale);
    note("v_scale", cache.v_scale);
  }
}

void PassAddresses::check(const PassAddresses& now) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& was = entries_[i];
    const bool listed = i < now.entries_.size() && now.entries_[i].array == was.array;
    const void* const address = listed ? now.entries_[i].address : nullptr;
    check_argument(address == was.address, "{} is at {}, the pass was captured with it at {}",
                   was.array, address, was.address);
  }
}

}  // namespace fovea
