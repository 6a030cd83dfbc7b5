// SPDX-License-Identifier: Apache-2.0
// Every array of a batch with its name and extent, in one list: checks of shapes and PassAddresses
// go through it, so a new array needs one line here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fovea/batch.h"

namespace fovea {

struct BatchArray {
  std::string_view name;  // path of the field in BatchView
  const void* data = nullptr;
  size_t size = 0;           // elements that the caller gave
  size_t element_bytes = 0;  // which data must be aligned to
  int64_t extent = 0;        // elements needed, as far as the host can tell without reading any
  bool on_host = false;      // host memory on every device
};

// Calls visit(const BatchArray&) for every span of the batch, absent ones included, in a fixed
// order. Tables are not spans: check_table() checks them.
template <typename Visit>
void for_each_array(const BatchView& batch, const Visit& visit) {
  const auto add = [&](std::string_view name, const auto& array, int64_t extent,
                       bool on_host = false) {
    visit(BatchArray{name, array.data(), array.size(), sizeof(*array.data()), extent, on_host});
  };
  const int64_t requests = batch.requests, tokens = batch.tokens;
  add("q_indptr", batch.q_indptr, requests + 1);
  add("kv_lens", batch.kv_lens, requests);
  add("request_rows", batch.request_rows, requests);
  add("out_slots", batch.out_slots, tokens);
  add("positions", batch.positions, tokens);
  add("masks.tree.ancestors", batch.masks.tree.ancestors, tokens);
  // Extents of 0 depend on contents or strides: the checks of the masks know them.
  add("masks.custom.visible", batch.masks.custom.visible, 0);
  add("masks.custom.indptr", batch.masks.custom.indptr, requests + 1);
  add("masks.spans.bounds", batch.masks.spans.bounds, 0);
  add("masks.spans.indptr", batch.masks.spans.indptr, requests + 1);
  add("masks.items.prefix_lens", batch.masks.items.prefix_lens, requests);
  add("masks.items.token_pos", batch.masks.items.token_pos, 0);
  add("cross.lens", batch.cross.lens, requests);
  add("linear.state_slots", batch.linear.state_slots, requests);
  add("linear.snapshot_slots", batch.linear.snapshot_slots, tokens);
  add("linear.draft_counts", batch.linear.draft_counts, requests);
  add("hints.host_q_lens", batch.hints.host_q_lens, requests, true);
  add("hints.host_kv_lens", batch.hints.host_kv_lens, requests, true);
  add("hints.shared_prefix", batch.hints.shared_prefix, requests);
}

}  // namespace fovea
