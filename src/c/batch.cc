// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "c/arguments.h"
#include "c/pass.h"
#include "c/tensors.h"

namespace fovea::c {
namespace {

constexpr fovea_batch kDefaultBatch = {.struct_size = sizeof(fovea_batch), .entry_tokens = 1};

// A table, and whether its rows are a part of wider ones.
struct GivenTable {
  TokenTable table;
  int64_t entries = 0;  // in a row
};

GivenTable to_table(const DLTensor* tensor, TensorName argument, int32_t entry_tokens) {
  if (tensor == nullptr) return {};
  const TensorView view = view_tensor(*tensor, argument, 2, "[rows, entries]");
  check_type(*tensor, argument.name, element_type<int32_t>());
  check_dense(view, argument.name, 1, 2);
  check(view.shape[0] <= INT32_MAX, "{} has {} rows, at most {}", argument.name, view.shape[0],
        INT32_MAX);
  check(view.strides[0] >= view.shape[1], "{}: strides[0] is {}, a row has {} entries",
        argument.name, view.strides[0], view.shape[1]);
  return {{.entries = reinterpret_cast<const int32_t*>(view.data),
           .stride = view.strides[0],
           .entry_tokens = entry_tokens,
           .rows = static_cast<int32_t>(view.shape[0])},
          view.shape[1]};
}

// Plan checks lengths against the stride of a table. Rows that are parts of wider ones end before.
void check_room(const GivenTable& given, int32_t max_kv_len, std::string_view name) {
  if (given.table.stride == given.entries) return;
  const int64_t room = given.entries * std::max(given.table.entry_tokens, 1);
  check(max_kv_len <= room, "hints.max_kv_len (or that of the limits) is {}, a row of {} has {}",
        max_kv_len, name, room);
}

BatchMasks to_masks(const fovea_batch_masks& masks, Device device) {
  BatchMasks to;
  to.tree.ancestors = dense_array<uint64_t>(masks.tree_ancestors, {"masks.tree_ancestors", device});
  to.custom = {
      .visible = dense_array<uint8_t>(masks.custom_visible, {"masks.custom_visible", device}),
      .indptr = dense_array<int64_t>(masks.custom_indptr, {"masks.custom_indptr", device})};
  to.spans = {.bounds = dense_array<int32_t>(masks.spans_bounds, {"masks.spans_bounds", device}),
              .indptr = dense_array<int32_t>(masks.spans_indptr, {"masks.spans_indptr", device})};
  to.items.prefix_lens =
      dense_array<uint32_t>(masks.items_prefix_lens, {"masks.items_prefix_lens", device});
  if (masks.items_token_pos == nullptr) return to;
  const TensorName name{"masks.items_token_pos", device};
  const TensorView view = view_tensor(*masks.items_token_pos, name, 2, "[requests, stride]");
  check_type(*masks.items_token_pos, name.name, element_type<uint16_t>());
  check_dense(view, name.name, 0, 2);
  to.items.token_pos = {reinterpret_cast<const uint16_t*>(view.data),
                        static_cast<size_t>(view.elements)};
  to.items.stride = view.shape[1];
  return to;
}

CrossBatch to_cross(const fovea_cross_batch& cross, Device device) {
  check_reserved(cross.reserved, "cross.reserved");
  const GivenTable given = to_table(cross.table, {"cross.table", device}, cross.entry_tokens);
  check(given.table.stride == given.entries || given.table.rows <= 1,
        "cross.table: strides[0] is {}, must be {}: rows are dense", given.table.stride,
        given.entries);
  return {.lens = dense_array<int32_t>(cross.lens, {"cross.lens", device}), .table = given.table};
}

BatchHints to_hints(const fovea_batch_hints& hints, Device device) {
  check_reserved(hints.reserved, "hints.reserved");
  return {
      .max_q_len = hints.max_q_len,
      .max_kv_len = hints.max_kv_len,
      .host_q_lens = dense_array<int32_t>(hints.host_q_lens, {"hints.host_q_lens"}),
      .host_kv_lens = dense_array<int32_t>(hints.host_kv_lens, {"hints.host_kv_lens"}),
      .shared_prefix = dense_array<int32_t>(hints.shared_prefix, {"hints.shared_prefix", device}),
      .prefix_written = to_flag(hints.prefix_written, "hints.prefix_written")};
}

}  // namespace

BatchView to_batch(const fovea_batch* batch, Device device, const BatchLimits& limits) {
  const fovea_batch from = read_struct(batch, kDefaultBatch, "batch");
  check_reserved(from.reserved, "batch.reserved");
  BatchView to;
  to.mode = to_enum(from.mode, ForwardMode::target_verify, "mode");
  to.requests = from.requests;
  to.tokens = from.tokens;
  to.q_indptr = dense_array<int32_t>(from.q_indptr, {"q_indptr", device});
  to.kv_lens = dense_array<int32_t>(from.kv_lens, {"kv_lens", device});
  to.request_rows = dense_array<int32_t>(from.request_rows, {"request_rows", device});
  const GivenTable given = to_table(from.table, {"table", device}, from.entry_tokens);
  to.table = given.table;
  to.out_slots = dense_array<int64_t>(from.out_slots, {"out_slots", device});
  to.positions = dense_array<int32_t>(from.positions, {"positions", device});
  to.masks = to_masks(from.masks, device);
  to.cross = to_cross(from.cross, device);
  to.linear = {
      .state_slots = dense_array<int32_t>(from.linear.state_slots, {"linear.state_slots", device}),
      .snapshot_slots =
          dense_array<int32_t>(from.linear.snapshot_slots, {"linear.snapshot_slots", device}),
      .draft_counts = dense_array<int32_t>(from.draft_counts, {"draft_counts", device})};
  to.hints = to_hints(from.hints, device);
  check_room(given, to.hints.max_kv_len > 0 ? to.hints.max_kv_len : limits.max_kv_len, "table");
  return to;
}

}  // namespace fovea::c

fovea_status fovea_batch_init(fovea_batch* batch, size_t struct_size) {
  return fovea::c::init_struct(batch, struct_size, fovea::c::kDefaultBatch, "batch");
}
