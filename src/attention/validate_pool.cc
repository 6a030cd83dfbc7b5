// SPDX-License-Identifier: Apache-2.0
#include "attention/validate_pool.h"

#include "attention/names.h"
#include "attention/validate_spec.h"
#include "core/check.h"

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

// A stride that was forgotten puts rows on top of each other.
void check_strides(const KvLayerView& view, const KvPool& pool, int32_t layer) {
  const KvCacheSpec& spec = pool.spec();
  const auto check = [&](const char* name, int64_t stride, int64_t count, const char* what) {
    check_argument(stride != 0 || count == 1, "layer {} of the pool: {} is 0, there are {} {}",
                   layer, name, count, what);
  };
  check("k_page_stride", view.k_page_stride, pool.pages(), "pages");
  check("k_token_stride", view.k_token_stride, spec.page_size, "tokens a page");
  check("k_head_stride", view.k_head_stride, spec.kv_heads, "heads");
  if (spec.layout != KvLayout::mha) return;  // v is the front of k's rows
  check("v_page_stride", view.v_page_stride, pool.pages(), "pages");
  check("v_token_stride", view.v_token_stride, spec.page_size, "tokens a page");
  check("v_head_stride", view.v_head_stride, spec.kv_heads, "heads");
}

}  // namespace

void validate_pool(const BackendContext& context) {
  const bool needs = uses_kv_cache(context.spec);
  check_argument((context.kv != nullptr) == needs, "kv is {}, these layers {} a KvPool",
                 context.kv != nullptr ? "given" : "null", needs ? "need" : "do not take");
  if (!needs) return;
  const KvPool& pool = *context.kv;
  check_argument(pool.device() == context.device, "the pool is on {}, the backend on {}",
                 device_name(pool.device()), device_name(context.device));
  validate_cache(context.spec, pool.spec());
  check_argument(pool.pages() >= 2,
                 "the pool has {} pages, must have at least 2: page 0 is reserved", pool.pages());
  for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
    const KvLayerView view = pool.layer(layer);
    check_view(view, pool, layer);
    check_strides(view, pool, layer);
  }
}

}  // namespace fovea
