// SPDX-License-Identifier: Apache-2.0
// Slots and pages, pools of keys and values, recurrent states. fovea/kv_cache.h explains slots,
// pages and the reserved page 0. Include fovea/fovea.h.
#ifndef FOVEA_C_STORAGE_H_
#define FOVEA_C_STORAGE_H_

#include "fovea/c/specs.h"

#ifdef __cplusplus
extern "C" {
#endif

// Slots of each request's tokens, [max_requests, max_context] in host memory. Row 0 is reserved.
typedef struct fovea_request_table fovea_request_table;
FOVEA_C_API fovea_status fovea_request_table_create(int32_t max_requests, int32_t max_context,
                                                    fovea_request_table** table);
FOVEA_C_API fovea_status fovea_request_table_destroy(fovea_request_table* table);
// Takes a row; FOVEA_FULL: all are in use.
FOVEA_C_API fovea_status fovea_request_table_allocate(fovea_request_table* table, int32_t* row);
// Clears a row and makes it free.
FOVEA_C_API fovea_status fovea_request_table_release(fovea_request_table* table, int32_t row);
// Gives the address of a row [max_context], which the caller reads and writes. Valid as long as the
// table.
FOVEA_C_API fovea_status fovea_request_table_row(fovea_request_table* table, int32_t row,
                                                 int32_t** slots);
// Makes `view` a view of the whole table, for fovea_batch::table.
FOVEA_C_API fovea_status fovea_request_table_view(const fovea_request_table* table,
                                                  fovea_tensor* view);
// Tracks changes for copies of the table: call it after writing slots of a row from position
// `first` on.
FOVEA_C_API fovea_status fovea_request_table_mark_changed(fovea_request_table* table, int32_t row,
                                                          int32_t first);
// Gives the first position that changed since the last call for the row; max_context: none.
FOVEA_C_API fovea_status fovea_request_table_take_changed(fovea_request_table* table, int32_t row,
                                                          int32_t* first);
FOVEA_C_API fovea_status fovea_request_table_available(const fovea_request_table* table,
                                                       int32_t* rows);

// Free pages and reference counts of one pool.
typedef struct fovea_page_allocator fovea_page_allocator;
// `pages` includes the reserved page 0.
FOVEA_C_API fovea_status fovea_page_allocator_create(int64_t pages, int32_t page_size,
                                                     fovea_page_allocator** allocator);
FOVEA_C_API fovea_status fovea_page_allocator_destroy(fovea_page_allocator* allocator);
// Extends a request from `prefix` to `length` tokens and writes the length - prefix new slots.
// last_slot is the slot of token prefix - 1 (-1 if prefix is 0). FOVEA_FULL: too few pages.
FOVEA_C_API fovea_status fovea_page_allocator_extend(fovea_page_allocator* allocator,
                                                     int32_t prefix, int32_t length,
                                                     int64_t last_slot, int64_t* slots);
// Takes `count` pages with a reference count of 1 each. FOVEA_FULL: too few.
FOVEA_C_API fovea_status fovea_page_allocator_allocate(fovea_page_allocator* allocator,
                                                       int64_t count, int64_t* pages);
FOVEA_C_API fovea_status fovea_page_allocator_retain(fovea_page_allocator* allocator, int64_t page);
FOVEA_C_API fovea_status fovea_page_allocator_release(fovea_page_allocator* allocator,
                                                      int64_t page);
// Releases every page that holds one of these slots of consecutive tokens, once per page.
FOVEA_C_API fovea_status fovea_page_allocator_release_slots(fovea_page_allocator* allocator,
                                                            const int32_t* slots, size_t count);
// Shrinks a request, whose slots are given, to its first `length` tokens.
FOVEA_C_API fovea_status fovea_page_allocator_truncate(fovea_page_allocator* allocator,
                                                       const int32_t* slots, size_t count,
                                                       int32_t length);
FOVEA_C_API fovea_status fovea_page_allocator_references(const fovea_page_allocator* allocator,
                                                         int64_t page, int32_t* owners);
FOVEA_C_API fovea_status fovea_page_allocator_free_pages(const fovea_page_allocator* allocator,
                                                         int64_t* pages);

// Keys and values of all layers of one group.
typedef struct fovea_kv_pool fovea_kv_pool;
// Allocates zeroed memory for `pages` pages, page 0 included.
FOVEA_C_API fovea_status fovea_kv_pool_create(const fovea_kv_cache_spec* spec, int64_t pages,
                                              fovea_device device, fovea_kv_pool** pool);
// Allocates a pool of window layers, addressed by slots of a full pool of full_slots slots.
FOVEA_C_API fovea_status fovea_window_kv_pool_create(const fovea_kv_cache_spec* spec, int64_t pages,
                                                     int64_t full_slots, fovea_device device,
                                                     fovea_kv_pool** pool);

// Memory of one layer that the caller lends. The last dimension is dense, other strides are free.
typedef struct fovea_kv_memory {
  // nhd: [pages, page_size, kv_heads, head_dim]; hnd: [pages, kv_heads, page_size, head_dim]; mla:
  // [pages, page_size, kv_lora_rank + rope_dim]; mla_fp8_rows: u8 [pages, page_size, 656].
  const DLTensor* k;
  const DLTensor* v;  // as k with head_dim_v; mla: NULL
  // f32. per_tensor: [1]; per_head: [kv_heads]; per_token_head: [pages * page_size, kv_heads].
  // none: NULL. mla: v_scale is NULL.
  const DLTensor* k_scale;
  const DLTensor* v_scale;
} fovea_kv_memory;

typedef struct fovea_lent_pool {
  uint32_t struct_size;
  // Default 1: only padding uses page 0. 0: its owner gives page 0 to requests, too.
  int32_t reserves_page_zero;
  const fovea_kv_cache_spec* spec;
  fovea_device device;
  const fovea_kv_memory* layers;  // [spec->layers]
  // With spec->window: i64 [slots of the full pool] -> slot of this pool, -1: none. Host memory.
  const DLTensor* slot_map;
  const DLTensor* device_slot_map;  // the same in memory of `device`; NULL on the CPU
} fovea_lent_pool;
FOVEA_C_API fovea_status fovea_lent_pool_init(fovea_lent_pool* lent, size_t struct_size);
// Makes a pool over memory of the caller, which must outlive all backends over it.
FOVEA_C_API fovea_status fovea_kv_pool_lend(const fovea_lent_pool* lent, fovea_kv_pool** pool);
FOVEA_C_API fovea_status fovea_kv_pool_destroy(fovea_kv_pool* pool);

// Addresses of one layer. Strides are in elements; mla_fp8_rows: in bytes.
typedef struct fovea_kv_layer_view {
  uint32_t struct_size;
  int32_t page_size;
  int64_t slots;  // page 0 included
  void* k;
  void* v;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  float* k_scale;
  float* v_scale;
} fovea_kv_layer_view;
FOVEA_C_API fovea_status fovea_kv_layer_view_init(fovea_kv_layer_view* view, size_t struct_size);
FOVEA_C_API fovea_status fovea_kv_pool_layer(const fovea_kv_pool* pool, int32_t layer,
                                             fovea_kv_layer_view* view);
FOVEA_C_API fovea_status fovea_kv_pool_pages(const fovea_kv_pool* pool, int64_t* pages);

// Pools of fovea_window_kv_pool_create alone; other pools are refused.
// Gives slots of the full pool a place here. FOVEA_FULL: nothing was mapped.
FOVEA_C_API fovea_status fovea_window_kv_pool_map(fovea_kv_pool* pool, const int64_t* full_slots,
                                                  size_t count);
FOVEA_C_API fovea_status fovea_window_kv_pool_unmap(fovea_kv_pool* pool, const int64_t* full_slots,
                                                    size_t count);
FOVEA_C_API fovea_status fovea_window_kv_pool_unmap_pages(fovea_kv_pool* pool,
                                                          const int64_t* full_pages, size_t count);
FOVEA_C_API fovea_status fovea_window_kv_pool_free_pages(const fovea_kv_pool* pool, int64_t* pages);
// On a GPU: copies changes to the device, for work enqueued on the stream afterwards.
FOVEA_C_API fovea_status fovea_window_kv_pool_publish(fovea_kv_pool* pool, void* stream);
// Gives the slot here of a slot of the full pool, -1: it is not mapped.
FOVEA_C_API fovea_status fovea_window_kv_pool_slot(const fovea_kv_pool* pool, int64_t full_slot,
                                                   int64_t* slot);
// Gives the tokens of a cached prefix, named by its full pages, that a request can continue from.
FOVEA_C_API fovea_status fovea_window_kv_pool_usable_prefix(const fovea_kv_pool* pool,
                                                            const int64_t* full_pages, size_t count,
                                                            int32_t* tokens);

// Recurrent states, one slot per request. Slot 0 is reserved.
typedef struct fovea_state_pool fovea_state_pool;
FOVEA_C_API fovea_status fovea_state_pool_create(const fovea_state_cache_spec* spec, int32_t slots,
                                                 fovea_device device, fovea_state_pool** pool);
FOVEA_C_API fovea_status fovea_state_pool_destroy(fovea_state_pool* pool);
// Takes a zeroed slot. FOVEA_FULL: all are in use.
FOVEA_C_API fovea_status fovea_state_pool_allocate(fovea_state_pool* pool, int32_t* slot);
FOVEA_C_API fovea_status fovea_state_pool_release(fovea_state_pool* pool, int32_t slot);
// Copies the states of all layers: fork, snapshot, restore.
FOVEA_C_API fovea_status fovea_state_pool_copy(fovea_state_pool* pool, int32_t from, int32_t to);
// On a GPU: enqueues what allocate and copy do to the states since the last call, for work that is
// enqueued on the stream afterwards.
FOVEA_C_API fovea_status fovea_state_pool_publish(fovea_state_pool* pool, void* stream);
FOVEA_C_API fovea_status fovea_state_pool_free_slots(const fovea_state_pool* pool, int32_t* slots);
// Sets *in_use to 1 if the slot is in use, to 0 also for slots that the pool does not have.
FOVEA_C_API fovea_status fovea_state_pool_in_use(const fovea_state_pool* pool, int32_t slot,
                                                 int32_t* in_use);

typedef struct fovea_state_layer_view {
  uint32_t struct_size;
  int32_t slots;             // slot 0 included
  float* conv;               // [slots, conv_dim, conv_width - 1], oldest first
  void* state;               // [slots, heads, rows, columns] of the spec's dtype
  int64_t conv_slot_stride;  // elements
  int64_t state_slot_stride;
  float* drafts;  // [slots, 2 * max_drafts, draft_inputs]; NULL if slots keep no drafts
} fovea_state_layer_view;
FOVEA_C_API fovea_status fovea_state_layer_view_init(fovea_state_layer_view* view,
                                                     size_t struct_size);
FOVEA_C_API fovea_status fovea_state_pool_layer(const fovea_state_pool* pool, int32_t layer,
                                                fovea_state_layer_view* view);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_STORAGE_H_
