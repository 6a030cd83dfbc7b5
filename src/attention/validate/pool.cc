// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/pool.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "attention/names.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "core/check_device.h"
#include "core/checked_math.h"
#include "core/strided_rows.h"
#include "kernels/mla_row.h"

namespace fovea {
namespace {

void check_view(const KvLayerView& view, const KvPool& pool, int32_t layer) {
  const KvCacheSpec& spec = pool.spec();
  check_argument(view.layout == spec.layout, "layer {} of the pool: layout is {}, its spec has {}",
                 layer, name_of(view.layout), name_of(spec.layout));
  check_argument(view.dtype == spec.dtype, "layer {} of the pool: dtype is {}, its spec has {}",
                 layer, dtype_name(view.dtype), dtype_name(spec.dtype));
  check_argument(view.scale == spec.scale, "layer {} of the pool: scale is {}, its spec has {}",
                 layer, name_of(view.scale), name_of(spec.scale));
  check_argument(view.page_size == spec.page_size,
                 "layer {} of the pool: page_size is {}, its spec has {}", layer, view.page_size,
                 spec.page_size);
  check_argument(view.slots == pool.pages() * spec.page_size,
                 "layer {} of the pool: slots is {}, must be {} pages of {}", layer, view.slots,
                 pool.pages(), spec.page_size);
  check_argument(view.k != nullptr && view.v != nullptr, "layer {} of the pool: {} is null", layer,
                 view.k == nullptr ? "k" : "v");
  check_argument(
      spec.scale == KvScale::none || (view.k_scale != nullptr && view.v_scale != nullptr),
      "layer {} of the pool: {} is null, scale is {}", layer,
      view.k_scale == nullptr ? "k_scale" : "v_scale", name_of(spec.scale));
}

// Returns the rows of a layer's keys or values in elements of the view's dtype; mla_fp8_rows:
// bytes.
StridedRows rows_of(const KvPool& pool, const char* data, int64_t row, int64_t page_stride,
                    int64_t token_stride, int64_t head_stride) {
  const KvCacheSpec& spec = pool.spec();
  return {.data = data,
          .element_bytes = static_cast<int64_t>(dtype_bytes(spec.dtype)),
          .row = row,
          .dimensions = {{{pool.pages(), page_stride},
                          {spec.page_size, token_stride},
                          {spec.kv_heads, head_stride}}}};
}

StridedRows keys_of(const KvLayerView& view, const KvPool& pool) {
  const bool rows = view.layout == KvLayout::mla_fp8_rows;
  return rows_of(pool, view.k, rows ? kernels::kMlaRowBytes : pool.spec().head_dim,
                 view.k_page_stride, view.k_token_stride, view.k_head_stride);
}

StridedRows values_of(const KvLayerView& view, const KvPool& pool) {
  return rows_of(pool, view.v, pool.spec().head_dim_v, view.v_page_stride, view.v_token_stride,
                 view.v_head_stride);
}

// Returns the scales that are written with the tokens.
StridedRows scales_of(const float* scales, const KvLayerView& view, const KvPool& pool) {
  return {.data = scales, .element_bytes = sizeof(float), .row = view.slots * pool.spec().kv_heads};
}

void check_rows(const StridedRows& rows, std::string_view name, int32_t layer) {
  check_reach(rows, fmt::format("layer {} of the pool: {}", layer, name));
  const auto& [pages, tokens, heads] = rows.dimensions;
  check_argument(are_disjoint(rows),
                 "layer {} of the pool: {}_page_stride is {} for {} pages, {}_token_stride {} for "
                 "{} tokens, {}_head_stride {} for {} heads: rows of {} elements overlap",
                 layer, name, pages.stride, pages.count, name, tokens.stride, tokens.count, name,
                 heads.stride, heads.count, rows.row);
}

// Checks the alignment of a row of 656 bytes, which has f32 scales and bf16 values after the
// latent.
void check_row_alignment(const KvLayerView& view, const KvPool& pool, int32_t layer) {
  const bool rows = view.layout == KvLayout::mla_fp8_rows;
  const int64_t bytes =
      rows ? int64_t{alignof(float)} : static_cast<int64_t>(dtype_bytes(view.dtype));
  for (const auto& [name, data] : {std::pair{"k", view.k}, {"v", view.v}}) {
    check_argument(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0,
                   "layer {} of the pool: {} is at {}, must be aligned to {} bytes", layer, name,
                   static_cast<const void*>(data), bytes);
  }
  check_aligned(view.k_scale, fmt::format("layer {} of the pool: k_scale", layer));
  check_aligned(view.v_scale, fmt::format("layer {} of the pool: v_scale", layer));
  if (!rows) return;  // strides are whole elements
  check_argument(view.k_token_stride % bytes == 0 || pool.spec().page_size == 1,
                 "layer {} of the pool: k_token_stride is {} bytes, must be a multiple of {}",
                 layer, view.k_token_stride, bytes);
  check_argument(view.k_page_stride % bytes == 0,
                 "layer {} of the pool: k_page_stride is {} bytes, must be a multiple of {}", layer,
                 view.k_page_stride, bytes);
}

void check_apart(const StridedRows& one, std::string_view name, const StridedRows& other,
                 std::string_view other_name, int32_t layer) {
  check_argument(!share_memory(one, other), "layer {} of the pool: {} at {} overlaps {} at {}",
                 layer, name, one.data, other_name, other.data);
}

// Throws if rows or scales that are written overlap.
void check_memory(const KvLayerView& view, const KvPool& pool, int32_t layer) {
  const StridedRows k = keys_of(view, pool), v = values_of(view, pool);
  check_row_alignment(view, pool, layer);
  check_rows(k, "k", layer);
  const bool separate = view.layout == KvLayout::mha;
  if (separate) {
    check_rows(v, "v", layer);
    check_apart(v, "v", k, "k", layer);
  } else {
    check_argument(view.v == view.k,
                   "layer {} of the pool: v is at {}, must be k = {}: a value is the front of its "
                   "key's row",
                   layer, static_cast<const void*>(view.v), static_cast<const void*>(view.k));
  }
  if (view.scale != KvScale::per_token_head) return;
  const StridedRows k_scales = scales_of(view.k_scale, view, pool);
  const StridedRows v_scales = scales_of(view.v_scale, view, pool);
  check_reach(k_scales, fmt::format("layer {} of the pool: k_scale", layer));
  check_reach(v_scales, fmt::format("layer {} of the pool: v_scale", layer));
  check_apart(k_scales, "k_scale", k, "k", layer);
  if (!separate) return;
  check_apart(k_scales, "k_scale", v, "v", layer);
  check_apart(v_scales, "v_scale", k, "k", layer);
  check_apart(v_scales, "v_scale", v, "v", layer);
  check_apart(v_scales, "v_scale", k_scales, "k_scale", layer);
}

bool same_memory(const KvLayerView& a, const KvLayerView& b) {
  return a.k == b.k && a.v == b.v && a.k_page_stride == b.k_page_stride &&
         a.k_token_stride == b.k_token_stride && a.k_head_stride == b.k_head_stride;
}

// Throws if two layers overlap without being the same.
void check_layers_apart(const KvPool& pool) {
  std::vector<int32_t> layers(static_cast<size_t>(pool.spec().layers));
  std::iota(layers.begin(), layers.end(), 0);
  std::ranges::stable_sort(layers, std::less<>{}, [&](int32_t i) { return pool.layer(i).k; });
  for (size_t i = 1; i < layers.size(); ++i) {
    const KvLayerView before = pool.layer(layers[i - 1]), view = pool.layer(layers[i]);
    if (same_memory(before, view)) continue;
    const std::string other = fmt::format("k of layer {}", layers[i - 1]);
    check_apart(keys_of(view, pool), "k", keys_of(before, pool), other, layers[i]);
    if (view.layout != KvLayout::mha) continue;
    check_apart(values_of(view, pool), "v", keys_of(before, pool), other, layers[i]);
    check_apart(keys_of(view, pool), "k", values_of(before, pool),
                fmt::format("v of layer {}", layers[i - 1]), layers[i]);
    check_apart(values_of(view, pool), "v", values_of(before, pool),
                fmt::format("v of layer {}", layers[i - 1]), layers[i]);
  }
}

void check_slot_map(const KvPool& pool) {
  const auto mapped = static_cast<int64_t>(pool.slot_map().size());
  const int32_t page_size = pool.spec().page_size;
  check_argument(mapped % page_size == 0,
                 "slot_map of the pool has {} slots, must be whole pages of {}", mapped, page_size);
  check_argument(mapped <= std::numeric_limits<int32_t>::max(),
                 "slot_map of the pool has {} slots, at most {}: slots are 32-bit", mapped,
                 std::numeric_limits<int32_t>::max());
}

// Returns the rows of one array of a layer's states.
StridedRows states_of(const void* data, DType dtype, int64_t row, const StateLayerView& view,
                      int64_t slot_stride) {
  return {.data = data,
          .element_bytes = static_cast<int64_t>(dtype_bytes(dtype)),
          .row = row,
          .dimensions = {{{view.slots, slot_stride}}}};
}

void check_states(const StridedRows& rows, std::string_view name, int32_t layer) {
  const std::string whole = fmt::format("layer {} of the state pool: {}", layer, name);
  check_argument(rows.data != nullptr, "{} is null", whole);
  if (rows.element_bytes == sizeof(float)) {
    check_aligned(static_cast<const float*>(rows.data), whole);
  } else {
    check_aligned(static_cast<const uint16_t*>(rows.data), whole);
  }
  check_reach(rows, whole);
  check_argument(are_disjoint(rows), "{}_slot_stride is {}, a slot has {} values: slots overlap",
                 whole, rows.dimensions[0].stride, rows.row);
}

}  // namespace

void validate_pool(const BackendContext& context) {
  const bool needs = uses_kv_cache(context.spec);
  check_argument((context.kv != nullptr) == needs, "kv is {}, these layers {} a KvPool",
                 context.kv != nullptr ? "given" : "null", needs ? "need" : "do not take");
  if (!needs) return;
  const KvPool& pool = *context.kv;
  check_device(context.device, "the backend's device");
  check_device(pool.device(), "the pool's device");
  check_argument(pool.device() == context.device, "the pool is on {}, the backend on {}",
                 device_name(pool.device()), device_name(context.device));
  validate_cache(context.spec, pool.spec());
  if (pool.reserves_page_zero()) {
    check_argument(pool.pages() >= 2,
                   "the pool has {} pages, must have at least 2: page 0 is reserved", pool.pages());
  } else {
    check_argument(pool.pages() >= 1, "the pool has {} pages, must have at least 1", pool.pages());
  }
  const int64_t most = std::numeric_limits<int32_t>::max() / pool.spec().page_size;
  check_argument(pool.pages() <= most,
                 "the pool has {} pages, at most {} with a page_size of {}: slots are 32-bit",
                 pool.pages(), most, pool.spec().page_size);
  for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
    const KvLayerView view = pool.layer(layer);
    check_view(view, pool, layer);
    check_memory(view, pool, layer);
  }
  check_layers_apart(pool);
  check_slot_map(pool);
}

void validate_state_pool(const BackendContext& context) {
  const bool needs = is_linear(context.spec.kind);
  check_argument((context.state != nullptr) == needs, "state is {}, these layers {} a StatePool",
                 context.state != nullptr ? "given" : "null", needs ? "need" : "do not take");
  if (!needs) return;
  const StatePool& pool = *context.state;
  const StateCacheSpec& spec = pool.spec();
  validate_state(context.spec, spec);
  check_device(context.device, "the backend's device");
  check_device(pool.device(), "the state pool's device");
  check_argument(pool.device() == context.device, "the state pool is on {}, the backend on {}",
                 device_name(pool.device()), device_name(context.device));
  check_argument(pool.slots() >= 2,
                 "the state pool has {} slots, must have at least 2: slot 0 is reserved",
                 pool.slots());
  check_argument((pool.marks() != nullptr) == (spec.max_drafts > 0),
                 "marks() of the state pool is {}, its max_drafts is {}",
                 pool.marks() != nullptr ? "given" : "null", spec.max_drafts);
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    const StateLayerView view = pool.layer(layer);
    check_argument(view.slots == pool.slots(),
                   "layer {} of the state pool: slots is {}, the pool has {}", layer, view.slots,
                   pool.slots());
    const StridedRows state =
        states_of(view.state, spec.dtype,
                  checked_product("heads * rows * columns", {spec.heads, spec.rows, spec.columns}),
                  view, view.state_slot_stride);
    const bool has_states = state.row > 0;
    if (has_states) check_states(state, "state", layer);
    if (spec.max_drafts > 0) {
      check_argument(view.drafts != nullptr, "layer {} of the state pool: drafts is null", layer);
    }
    if (context.spec.linear.conv_width <= 1) continue;
    const StridedRows conv =
        states_of(view.conv, DType::f32, int64_t{spec.conv_dim} * (spec.conv_width - 1), view,
                  view.conv_slot_stride);
    check_states(conv, "conv", layer);
    check_argument(!has_states || !share_memory(conv, state),
                   "layer {} of the state pool: conv at {} overlaps state at {}", layer, conv.data,
                   state.data);
  }
}

}  // namespace fovea
