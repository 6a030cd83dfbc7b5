// SPDX-License-Identifier: Apache-2.0
#include "fovea/pool_regions.h"

#include <fmt/format.h>

#include "core/check.h"

namespace fovea {
namespace {

constexpr int64_t kFp8RowBytes = 656;  // KvLayout::mla_fp8_rows

uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

const char* layout_name(KvLayout layout) {
  return layout == KvLayout::mha ? "mha" : layout == KvLayout::mla ? "mla" : "mla_fp8_rows";
}

std::string words_of(const KvCacheSpec& spec) {
  return fmt::format(
      "kv: layout {}, {} layers, {} kv heads of {} and {}, {}, scale {}, order {}, pages of {}, "
      "window {}",
      layout_name(spec.layout), spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim_v,
      dtype_name(spec.dtype), spec.scale == KvScale::none ? "none" : "per token and head",
      spec.order == KvOrder::nhd ? "nhd" : "hnd", spec.page_size, spec.window);
}

std::string words_of(const StateCacheSpec& spec) {
  std::string states = fmt::format("states: {} layers, conv {} x {}, {} heads of {} x {}, {}",
                                   spec.layers, spec.conv_dim, spec.conv_width - 1, spec.heads,
                                   spec.rows, spec.columns, dtype_name(spec.dtype));
  if (spec.max_drafts == 0) return states;
  return fmt::format("{}, {} drafts of {}", states, spec.max_drafts, spec.draft_inputs);
}

// The rows of K or of V of one layer.
struct PageRows {
  char* address = nullptr;
  int64_t page_stride = 0, token_stride = 0, head_stride = 0, row = 0;  // bytes
};

PoolRegion region_of(const KvPool& pool, const PageRows& rows, std::string name) {
  const KvCacheSpec& spec = pool.spec();
  const int64_t bytes = rows.row * spec.kv_heads * spec.page_size;
  const int64_t extent =
      (spec.page_size - 1) * rows.token_stride + (spec.kv_heads - 1) * rows.head_stride + rows.row;
  if (extent != bytes || rows.page_stride < bytes) {
    fail(ErrorCode::unsupported,
         "{}: a page is no run of {} bytes: its rows spread over {}, and pages are {} apart", name,
         bytes, extent, rows.page_stride);
  }
  PoolRegion region;
  region.name = std::move(name);
  region.address = rows.address;
  region.unit_bytes = static_cast<size_t>(bytes);
  region.unit_stride = static_cast<size_t>(rows.page_stride);
  region.units = pool.pages();
  region.bytes = static_cast<size_t>(pool.pages() - 1) * region.unit_stride + region.unit_bytes;
  region.device = pool.device();
  return region;
}

PoolRegion dense_region(std::string name, void* address, size_t unit_bytes, int64_t units,
                        Device device) {
  return {.name = std::move(name),
          .address = address,
          .bytes = unit_bytes * static_cast<size_t>(units),
          .unit_bytes = unit_bytes,
          .unit_stride = unit_bytes,
          .units = units,
          .device = device};
}

void add_layer(const KvPool& pool, int32_t index, std::vector<PoolRegion>& regions) {
  const KvCacheSpec& spec = pool.spec();
  const KvLayerView view = pool.layer(index);
  const auto element = static_cast<int64_t>(dtype_bytes(spec.dtype));
  const auto name = [&](const char* array) { return fmt::format("layer {} {}", index, array); };
  const int64_t k_row =
      spec.layout == KvLayout::mla_fp8_rows ? kFp8RowBytes : spec.head_dim * element;
  regions.push_back(region_of(pool,
                              {view.k, view.k_page_stride * element, view.k_token_stride * element,
                               view.k_head_stride * element, k_row},
                              name("k")));
  const bool has_v = spec.layout == KvLayout::mha;  // values of latents are a part of the keys
  if (has_v) {
    regions.push_back(
        region_of(pool,
                  {view.v, view.v_page_stride * element, view.v_token_stride * element,
                   view.v_head_stride * element, spec.head_dim_v * element},
                  name("v")));
  }
  if (spec.scale == KvScale::none) return;
  const size_t scales =
      static_cast<size_t>(spec.page_size) * static_cast<size_t>(spec.kv_heads) * sizeof(float);
  regions.push_back(
      dense_region(name("k_scale"), view.k_scale, scales, pool.pages(), pool.device()));
  if (!has_v) return;
  regions.push_back(
      dense_region(name("v_scale"), view.v_scale, scales, pool.pages(), pool.device()));
}

}  // namespace

PoolDescription describe_pool(const KvPool& pool) {
  const KvCacheSpec& spec = pool.spec();
  if (spec.scale == KvScale::per_tensor || spec.scale == KvScale::per_head) {
    fail(ErrorCode::unsupported,
         "scale is {}: scales that the caller sets once are no part of a page, so they do not move "
         "with it",
         spec.scale == KvScale::per_tensor ? "per_tensor" : "per_head");
  }
  PoolDescription description;
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    add_layer(pool, layer, description.regions);
  }
  description.layout = words_of(spec);
  description.checksum = fnv1a(description.layout);
  return description;
}

PoolDescription describe_pool(const StatePool& pool) {
  const StateCacheSpec& spec = pool.spec();
  PoolDescription description;
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    const StateLayerView view = pool.layer(layer);
    const auto conv = static_cast<size_t>(view.conv_slot_stride) * sizeof(float);
    const auto state = static_cast<size_t>(view.state_slot_stride) * dtype_bytes(spec.dtype);
    if (conv > 0) {
      description.regions.push_back(dense_region(fmt::format("layer {} conv", layer), view.conv,
                                                 conv, pool.slots(), pool.device()));
    }
    if (state > 0) {
      description.regions.push_back(dense_region(fmt::format("layer {} state", layer), view.state,
                                                 state, pool.slots(), pool.device()));
    }
    if (view.drafts == nullptr) continue;
    const auto drafts = sizeof(float) * 2 * static_cast<size_t>(spec.max_drafts) *
                        static_cast<size_t>(spec.draft_inputs);
    description.regions.push_back(dense_region(fmt::format("layer {} drafts", layer), view.drafts,
                                               drafts, pool.slots(), pool.device()));
  }
  if (pool.marks() != nullptr) {
    description.regions.push_back(
        dense_region("marks", pool.marks(), sizeof(StateMark), pool.slots(), pool.device()));
  }
  description.layout = words_of(spec);
  description.checksum = fnv1a(description.layout);
  return description;
}

}  // namespace fovea
