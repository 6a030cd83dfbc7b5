// SPDX-License-Identifier: Apache-2.0
// Pools of keys and values, of windows, of recurrent states.
#include "c/handles.h"
#include "c/lent_pool.h"
#include "c/specs.h"

namespace fovea::c {
namespace {

constexpr fovea_kv_layer_view kDefaultKvLayer = {.struct_size = sizeof(fovea_kv_layer_view)};
constexpr fovea_state_layer_view kDefaultStateLayer = {.struct_size =
                                                           sizeof(fovea_state_layer_view)};

WindowKvPool& window_pool(const fovea_kv_pool* pool) {
  const fovea_kv_pool& given = need(pool, "pool");
  check(given.window != nullptr,
        "pool was not made by fovea_window_kv_pool_create(), this call needs such a pool");
  return *given.window;
}

StatePool& state_pool(const fovea_state_pool* pool) { return *need(pool, "pool").object; }

fovea_kv_layer_view from_view(const KvLayerView& view) {
  fovea_kv_layer_view to = kDefaultKvLayer;
  to.page_size = view.page_size;
  to.slots = view.slots;
  to.k = view.k;
  to.v = view.v;
  to.k_page_stride = view.k_page_stride;
  to.k_token_stride = view.k_token_stride;
  to.k_head_stride = view.k_head_stride;
  to.v_page_stride = view.v_page_stride;
  to.v_token_stride = view.v_token_stride;
  to.v_head_stride = view.v_head_stride;
  to.k_scale = view.k_scale;
  to.v_scale = view.v_scale;
  return to;
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_kv_pool_create(const fovea_kv_cache_spec* spec, int64_t pages,
                                  fovea_device device, fovea_kv_pool** pool) {
  return guarded([&] {
    clear_handle(pool, "pool");
    auto made = std::make_unique<fovea_kv_pool>();
    made->object = fovea::make_kv_pool(to_spec(spec), pages, to_device(device));
    give_handle(std::move(made), pool);
  });
}

fovea_status fovea_window_kv_pool_create(const fovea_kv_cache_spec* spec, int64_t pages,
                                         int64_t full_slots, fovea_device device,
                                         fovea_kv_pool** pool) {
  return guarded([&] {
    clear_handle(pool, "pool");
    auto made = std::make_unique<fovea_kv_pool>();
    std::shared_ptr<fovea::WindowKvPool> window =
        fovea::make_window_kv_pool(to_spec(spec), pages, full_slots, to_device(device));
    made->window = window.get();
    made->object = std::move(window);
    give_handle(std::move(made), pool);
  });
}

fovea_status fovea_lent_pool_init(fovea_lent_pool* lent, size_t struct_size) {
  return init_struct(lent, struct_size, kDefaultLentPool, "lent");
}

fovea_status fovea_kv_pool_lend(const fovea_lent_pool* lent, fovea_kv_pool** pool) {
  return guarded([&] {
    clear_handle(pool, "pool");
    auto made = std::make_unique<fovea_kv_pool>();
    made->object = make_lent_pool(lent);
    give_handle(std::move(made), pool);
  });
}

fovea_status fovea_kv_pool_destroy(fovea_kv_pool* pool) { return destroy_handle(pool, "pool"); }

fovea_status fovea_kv_layer_view_init(fovea_kv_layer_view* view, size_t struct_size) {
  return init_struct(view, struct_size, kDefaultKvLayer, "view");
}

fovea_status fovea_kv_pool_layer(const fovea_kv_pool* pool, int32_t layer,
                                 fovea_kv_layer_view* view) {
  return guarded(
      [&] { write_struct(view, from_view(need(pool, "pool").object->layer(layer)), "view"); });
}

fovea_status fovea_kv_pool_pages(const fovea_kv_pool* pool, int64_t* pages) {
  return guarded([&] { set(pages, need(pool, "pool").object->pages(), "pages"); });
}

fovea_status fovea_window_kv_pool_map(fovea_kv_pool* pool, const int64_t* full_slots,
                                      size_t count) {
  return guarded([&]() -> fovea_status {
    const auto slots = entries(full_slots, count, "full_slots");
    if (window_pool(pool).map(slots)) return FOVEA_OK;
    return failed(FOVEA_FULL, "the window pool has too few free pages");
  });
}

fovea_status fovea_window_kv_pool_unmap(fovea_kv_pool* pool, const int64_t* full_slots,
                                        size_t count) {
  return guarded([&] { window_pool(pool).unmap(entries(full_slots, count, "full_slots")); });
}

fovea_status fovea_window_kv_pool_unmap_pages(fovea_kv_pool* pool, const int64_t* full_pages,
                                              size_t count) {
  return guarded([&] { window_pool(pool).unmap_pages(entries(full_pages, count, "full_pages")); });
}

fovea_status fovea_window_kv_pool_free_pages(const fovea_kv_pool* pool, int64_t* pages) {
  return guarded([&] { set(pages, window_pool(pool).free_pages(), "pages"); });
}

fovea_status fovea_window_kv_pool_publish(fovea_kv_pool* pool, void* stream) {
  return guarded([&] { window_pool(pool).publish(static_cast<fovea::Stream>(stream)); });
}

fovea_status fovea_window_kv_pool_slot(const fovea_kv_pool* pool, int64_t full_slot,
                                       int64_t* slot) {
  return guarded([&] {
    const auto map = window_pool(pool).slot_map();
    const auto slots = static_cast<int64_t>(map.size());
    check(full_slot >= 0 && full_slot < slots, "full_slot is {}, must be in [0, {})", full_slot,
          slots);
    set(slot, map[static_cast<size_t>(full_slot)], "slot");
  });
}

fovea_status fovea_window_kv_pool_usable_prefix(const fovea_kv_pool* pool,
                                                const int64_t* full_pages, size_t count,
                                                int32_t* tokens) {
  return guarded([&] {
    const auto pages = entries(full_pages, count, "full_pages");
    set(tokens, fovea::usable_window_prefix(window_pool(pool), pages), "tokens");
  });
}

fovea_status fovea_state_pool_create(const fovea_state_cache_spec* spec, int32_t slots,
                                     fovea_device device, fovea_state_pool** pool) {
  return guarded([&] {
    clear_handle(pool, "pool");
    auto made = std::make_unique<fovea_state_pool>();
    made->object = fovea::make_state_pool(to_spec(spec), slots, to_device(device));
    give_handle(std::move(made), pool);
  });
}

fovea_status fovea_state_pool_destroy(fovea_state_pool* pool) {
  return destroy_handle(pool, "pool");
}

fovea_status fovea_state_pool_allocate(fovea_state_pool* pool, int32_t* slot) {
  return guarded([&]() -> fovea_status {
    fovea::StatePool& states = state_pool(pool);
    set(slot, -1, "slot");
    const auto taken = states.allocate();
    if (!taken) return failed(FOVEA_FULL, "no slot of the state pool is free");
    *slot = *taken;
    return FOVEA_OK;
  });
}

fovea_status fovea_state_pool_release(fovea_state_pool* pool, int32_t slot) {
  return guarded([&] { state_pool(pool).release(slot); });
}

fovea_status fovea_state_pool_copy(fovea_state_pool* pool, int32_t from, int32_t to) {
  return guarded([&] { state_pool(pool).copy(from, to); });
}

fovea_status fovea_state_pool_publish(fovea_state_pool* pool, void* stream) {
  return guarded([&] { state_pool(pool).publish(static_cast<fovea::Stream>(stream)); });
}

fovea_status fovea_state_pool_free_slots(const fovea_state_pool* pool, int32_t* slots) {
  return guarded([&] { set(slots, state_pool(pool).free_slots(), "slots"); });
}

fovea_status fovea_state_pool_in_use(const fovea_state_pool* pool, int32_t slot, int32_t* in_use) {
  return guarded([&] { set(in_use, state_pool(pool).in_use(slot) ? 1 : 0, "in_use"); });
}

fovea_status fovea_state_layer_view_init(fovea_state_layer_view* view, size_t struct_size) {
  return init_struct(view, struct_size, kDefaultStateLayer, "view");
}

fovea_status fovea_state_pool_layer(const fovea_state_pool* pool, int32_t layer,
                                    fovea_state_layer_view* view) {
  return guarded([&] {
    const fovea::StateLayerView from = state_pool(pool).layer(layer);
    fovea_state_layer_view to = kDefaultStateLayer;
    to.slots = from.slots;
    to.conv = from.conv;
    to.state = from.state;
    to.conv_slot_stride = from.conv_slot_stride;
    to.state_slot_stride = from.state_slot_stride;
    to.drafts = from.drafts;
    write_struct(view, to, "view");
  });
}
