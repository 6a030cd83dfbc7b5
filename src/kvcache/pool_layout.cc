// SPDX-License-Identifier: Apache-2.0
#include "kvcache/pool_layout.h"

#include <limits>

#include "core/check.h"
#include "core/checked_math.h"
#include "kernels/mla_row.h"

namespace fovea {
namespace {

using kernels::kMlaRowBytes;
using kernels::kMlaRowLatent;
using kernels::kMlaRowRope;

void check_spec(const KvCacheSpec& spec) {
  check_enum(spec.layout, KvLayout::mla_fp8_rows, "layout", "KvLayout");
  check_enum(spec.order, KvOrder::hnd, "order", "KvOrder");
  check_enum(spec.scale, KvScale::per_token_head, "scale", "KvScale");
  check_enum(spec.dtype, DType::u8, "dtype", "DType");
  check_argument(spec.layers > 0, "layers is {}, must be positive", spec.layers);
  check_argument(spec.kv_heads > 0, "kv_heads is {}, must be positive", spec.kv_heads);
  check_argument(spec.head_dim > 0, "head_dim is {}, must be positive", spec.head_dim);
  check_argument(spec.head_dim_v > 0, "head_dim_v is {}, must be positive", spec.head_dim_v);
  check_argument(spec.page_size > 0, "page_size is {}, must be positive", spec.page_size);
  check_argument(spec.window >= 0, "window is {}, must not be negative", spec.window);
  check_argument(is_floating(spec.dtype), "dtype {} cannot hold keys and values",
                 dtype_name(spec.dtype));
  if (spec.layout == KvLayout::mha) {
    check_argument(spec.scale == KvScale::none || is_fp8(spec.dtype),
                   "a cache of dtype {} takes no scales, only fp8 does", dtype_name(spec.dtype));
    return;
  }
  check_argument(spec.kv_heads == 1, "kv_heads is {}, an mla cache has 1", spec.kv_heads);
  check_argument(spec.head_dim_v <= spec.head_dim,
                 "head_dim_v is {}, an mla value is the front of its row of head_dim {}",
                 spec.head_dim_v, spec.head_dim);
  if (spec.layout == KvLayout::mla) {
    check_argument(spec.scale == KvScale::none || is_fp8(spec.dtype),
                   "a cache of dtype {} takes no scales, only fp8 does", dtype_name(spec.dtype));
    return;
  }
  check_argument(spec.scale == KvScale::none, "mla_fp8_rows carry their scales inside the rows");
  check_argument(fits_mla_fp8_rows(spec),
                 "head_dim, head_dim_v are {}, {} of {}, mla_fp8_rows hold {}, {} of {}",
                 spec.head_dim, spec.head_dim_v, dtype_name(spec.dtype),
                 kMlaRowLatent + kMlaRowRope, kMlaRowLatent, dtype_name(DType::f8e4m3));
}

// Elements in one page of rows of `dim`, and the strides inside it.
struct PageShape {
  int64_t page, token, head;
};

PageShape page_shape(const KvCacheSpec& spec, int64_t dim) {
  const int64_t page =
      checked_product("page_size * kv_heads * head_dim", {spec.page_size, spec.kv_heads, dim});
  if (spec.order == KvOrder::nhd) return {page, spec.kv_heads * dim, dim};
  return {page, dim, spec.page_size * dim};
}

// Returns the number of floats in one scale array over `pages` pages.
int64_t scale_count(const KvCacheSpec& spec, int64_t pages) {
  switch (spec.scale) {
    case KvScale::none:
      return 0;
    case KvScale::per_tensor:
      return 1;
    case KvScale::per_head:
      return spec.kv_heads;
    case KvScale::per_token_head:
      return checked_product("pages * page_size * kv_heads",
                             {pages, spec.page_size, spec.kv_heads});
  }
  return 0;
}

}  // namespace

int64_t align_up(std::string_view what, int64_t bytes) {
  return checked_sum(what, {bytes, kPoolAlignment - 1}) / kPoolAlignment * kPoolAlignment;
}

KvPoolLayout kv_pool_layout(const KvCacheSpec& spec, int64_t pages) {
  check_spec(spec);
  check_argument(pages >= 1 && pages <= std::numeric_limits<int32_t>::max() / spec.page_size,
                 "pages is {}, must be in [1, {}] with a page_size of {}: slots are 32-bit", pages,
                 std::numeric_limits<int32_t>::max() / spec.page_size, spec.page_size);
  const bool rows = spec.layout == KvLayout::mla_fp8_rows;
  const bool separate_v = spec.layout == KvLayout::mha;
  const auto element = static_cast<int64_t>(dtype_bytes(spec.dtype));
  const PageShape k = page_shape(spec, rows ? kMlaRowBytes : spec.head_dim);
  const PageShape v = separate_v ? page_shape(spec, spec.head_dim_v) : k;

  constexpr const char* kWhat = "the size of the pool";
  KvPoolLayout layout;
  layout.scales = scale_count(spec, pages);
  const int64_t scale_bytes = align_up(kWhat, layout.scales * int64_t{sizeof(float)});
  const int64_t k_bytes = align_up(kWhat, checked_product(kWhat, {k.page, pages, element}));
  const int64_t v_bytes = align_up(kWhat, checked_product(kWhat, {v.page, pages, element}));
  layout.v_offset = separate_v ? k_bytes : 0;
  layout.k_scale_offset = separate_v ? checked_sum(kWhat, {k_bytes, v_bytes}) : k_bytes;
  layout.v_scale_offset = layout.k_scale_offset + (separate_v ? scale_bytes : 0);
  layout.layer_bytes = checked_sum(kWhat, {layout.v_scale_offset, scale_bytes});
  layout.total_bytes = checked_product(kWhat, {layout.layer_bytes, spec.layers});

  layout.view.layout = spec.layout;
  layout.view.scale = spec.scale;
  layout.view.dtype = spec.dtype;
  layout.view.page_size = spec.page_size;
  layout.view.slots = pages * spec.page_size;
  layout.view.k_page_stride = k.page;
  layout.view.k_token_stride = k.token;
  layout.view.k_head_stride = k.head;
  layout.view.v_page_stride = v.page;
  layout.view.v_token_stride = v.token;
  layout.view.v_head_stride = v.head;
  return layout;
}

KvLayerView kv_layer_view(const KvPoolLayout& layout, char* base, int32_t layer) {
  KvLayerView view = layout.view;
  view.k = base + layer * layout.layer_bytes;
  view.v = view.k + layout.v_offset;
  if (layout.scales > 0) {
    view.k_scale = reinterpret_cast<float*>(view.k + layout.k_scale_offset);
    view.v_scale = reinterpret_cast<float*>(view.k + layout.v_scale_offset);
  }
  return view;
}

bool fits_mla_fp8_rows(const KvCacheSpec& spec) {
  return spec.dtype == DType::f8e4m3 && spec.scale == KvScale::none &&
         spec.head_dim == kMlaRowLatent + kMlaRowRope && spec.head_dim_v == kMlaRowLatent;
}

size_t KvCacheSpec::bytes_per_page() const {
  check_spec(*this);
  constexpr const char* kWhat = "bytes per page";
  const bool rows = layout == KvLayout::mla_fp8_rows;
  const bool separate_v = layout == KvLayout::mha;
  const int64_t dims = rows ? kMlaRowBytes : int64_t{head_dim} + (separate_v ? head_dim_v : 0);
  const int64_t row_bytes =
      checked_product(kWhat, {dims, static_cast<int64_t>(dtype_bytes(dtype))});
  const int64_t scale_bytes =
      scale == KvScale::per_token_head ? int64_t{sizeof(float)} * (separate_v ? 2 : 1) : 0;
  return static_cast<size_t>(checked_product(
      kWhat, {checked_sum(kWhat, {row_bytes, scale_bytes}), page_size, kv_heads, layers}));
}

std::optional<KvLayerView> split_pages(const KvLayerView& view, int32_t page_size) {
  if (page_size < 1 || view.page_size % page_size != 0) return std::nullopt;
  if (page_size == view.page_size) return view;
  // Tokens are contiguous across pages only if nothing else lies between the pages.
  if (view.k_page_stride != view.page_size * view.k_token_stride ||
      view.v_page_stride != view.page_size * view.v_token_stride) {
    return std::nullopt;
  }
  KvLayerView split = view;
  split.page_size = page_size;
  split.k_page_stride = page_size * view.k_token_stride;
  split.v_page_stride = page_size * view.v_token_stride;
  return split;
}

}  // namespace fovea
