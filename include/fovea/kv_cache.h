// SPDX-License-Identifier: Apache-2.0
// Storage: who owns which slot, and where its bytes are.
//
// Words. A *slot* holds one token of one pool; a *page* is page_size consecutive slots. A request
// owns a row of the RequestTable that lists the slot of each of its tokens, with the invariant
// slot % page_size == position % page_size. Page 0 is a dummy that is never handed out: padding
// reads and writes land there, and its content stays finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fovea/device.h"
#include "fovea/dtype.h"

namespace fovea {

enum class KvLayout : uint8_t {
  mha,           // separate K and V, [slot, kv_head, dim]
  mla,           // one row per slot: latent then rotary key, all of one dtype
  mla_fp8_rows,  // 656-byte rows: 512 e4m3, 4 f32 scales (one per 128), 64 bf16 rotary values
};

// Where the scales of a quantised cache live. x is stored as round(x / scale), saturated.
enum class KvScale : uint8_t {
  none,            // scale 1
  per_tensor,      // one for K and one for V of a layer, given by the caller
  per_head,        // [kv_heads] of each, given by the caller
  per_token_head,  // [slots, kv_heads] of each, computed when the token is written
};

// Physical order inside a page; the logical shape is the same.
enum class KvOrder : uint8_t {
  nhd,  // [page, token, head, dim]
  hnd,  // [page, head, token, dim]; `cpu` decodes bf16 1.3 times as fast from it (2026-11-21)
};

struct KvCacheSpec {
  KvLayout layout = KvLayout::mha;
  KvOrder order = KvOrder::nhd;
  DType dtype = DType::f32;  // mla_fp8_rows: f8e4m3
  KvScale scale = KvScale::none;
  int32_t layers = 0;
  int32_t kv_heads = 0;    // mla: 1
  int32_t head_dim = 0;    // of K. mla: kv_lora_rank + rope_dim
  int32_t head_dim_v = 0;  // of V. mla: kv_lora_rank (V is the front of the K row)
  int32_t page_size = 1;   // tokens, >= 1
  int32_t window = 0;      // > 0: a sliding-window pool addressed through slot_map()

  // Over all layers, with the scales that are written with the tokens. Throws
  // Error{invalid_argument} naming the field that is out of range.
  size_t bytes_per_page() const;
};

// Whether this cache of MLA layers, whatever its layout says, can be KvLayout::mla_fp8_rows: a
// latent of 512 and a rotary key of 64 in f8e4m3, without scales but those inside the rows.
bool fits_mla_fp8_rows(const KvCacheSpec& spec);

// One layer's cache as kernels see it. Element (slot, head) of K is at
//   k + ((slot / page_size) * k_page_stride + (slot % page_size) * k_token_stride
//        + head * k_head_stride) * dtype_bytes(dtype)
// and V likewise; dim is contiguous. mla: v aliases k. mla_fp8_rows: strides count bytes.
struct KvLayerView {
  KvLayout layout = KvLayout::mha;
  KvScale scale = KvScale::none;
  DType dtype = DType::f32;
  int32_t page_size = 1;
  int64_t slots = 0;  // including page 0
  char* k = nullptr;
  char* v = nullptr;
  int64_t k_page_stride = 0, k_token_stride = 0, k_head_stride = 0;
  int64_t v_page_stride = 0, v_token_stride = 0, v_head_stride = 0;
  // per_tensor: [1]; per_head: [kv_heads]; both belong to the caller, who sets them before the
  // first write. per_token_head: [slots, kv_heads] and written with the rows. Null for none. mla
  // has one row and so one scale: v_scale aliases k_scale.
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};

// Byte addresses of one (slot, head) row.
inline char* k_address(const KvLayerView& view, int64_t slot, int64_t head) {
  return view.k + (slot / view.page_size * view.k_page_stride +
                   slot % view.page_size * view.k_token_stride + head * view.k_head_stride) *
                      static_cast<int64_t>(dtype_bytes(view.dtype));
}
inline char* v_address(const KvLayerView& view, int64_t slot, int64_t head) {
  return view.v + (slot / view.page_size * view.v_page_stride +
                   slot % view.page_size * view.v_token_stride + head * view.v_head_stride) *
                      static_cast<int64_t>(dtype_bytes(view.dtype));
}

// The bytes of K and V for all layers of one group. Implement it to lend memory you own; the
// library's own pools come from make_kv_pool. Views stay valid and unchanged for the pool's life;
// create() of a backend holds them against spec(). Addresses in them, scales included, are of the
// pool's device; on a GPU those of k and v and their strides are multiples of 16 bytes.
class KvPool {
 public:
  virtual ~KvPool() = default;
  virtual const KvCacheSpec& spec() const = 0;
  virtual int64_t pages() const = 0;  // including page 0
  // Throws Error{invalid_argument} naming an index the pool does not have.
  virtual KvLayerView layer(int32_t index) const = 0;
  virtual Device device() const { return {}; }
  // Sliding-window pools: [slots of the full pool] -> slot here, -1 where the token has left the
  // window. Empty: slots are this pool's own. The span is memory of the host.
  virtual std::span<const int64_t> slot_map() const { return {}; }
  // The same array in the pool's device memory, for kernels; null where slot_map() is empty.
  virtual const int64_t* device_slot_map() const { return slot_map().data(); }
};

// Allocates zeroed memory on `device` for `pages` pages (>= 2, page 0 included); scales per_tensor
// and per_head start at 1. On the CPU memory nobody writes costs address space only. spec.window
// must be 0. Throws Error{invalid_argument} naming the field, Error{out_of_memory} naming the bytes
// or Error{unsupported} saying why there is no such GPU.
std::unique_ptr<KvPool> make_kv_pool(const KvCacheSpec& spec, int64_t pages, Device device = {});

// Bytes of the arrays make_kv_pool or, with full_slots > 0, make_window_kv_pool allocates: pages *
// bytes_per_page, alignment, fixed scales and the slot map.
size_t kv_pool_bytes(const KvCacheSpec& spec, int64_t pages, int64_t full_slots = 0);

// The same cache for a kernel that wants pages of `page_size` tokens: slots keep their numbers and
// page p becomes the pages p * n ... p * n + n - 1, n = view.page_size / page_size. nullopt: no
// such view exists, because page_size does not divide the view's or the order is hnd with several
// heads.
std::optional<KvLayerView> split_pages(const KvLayerView& view, int32_t page_size);

// A pool of window layers. Slots are translated from those of a full pool: the window pool holds
// only tokens inside somebody's window, so it needs far fewer pages than the full pool has.
//
// A full page that has any mapped slot owns one window page, and a slot keeps its place in the
// page: slot_map()[s] % page_size == s % page_size. So a page table of window pages is as well
// defined as one of full pages; it is meaningful for the pages that hold the window. The window
// page is free again when the last of its slots is unmapped. A request that unmaps what leaves its
// window holds at most ceil((window - 1 + new tokens) / page_size) + 1 pages. Page 0 maps to page
// 0.
//
// The pool does not know windows of requests. Where full pages are shared, a page that one request
// has left may still be inside another's window: whoever unmaps counts the users of a page.
class WindowKvPool : public KvPool {
 public:
  // Gives each of the full pool's slots a place here; slots that have one keep it. False: nothing
  // was taken, the pool is full.
  virtual bool map(std::span<const int64_t> full_slots) = 0;
  // Forgets slots that have left every window or whose owner has freed them. Repeats are ignored.
  virtual void unmap(std::span<const int64_t> full_slots) = 0;
  virtual void unmap(std::span<const int32_t> full_slots) = 0;  // part of a request's row
  virtual void unmap_pages(std::span<const int64_t> full_pages) = 0;
  virtual int64_t free_pages() const = 0;
  // On a GPU: brings what map and unmap changed to device_slot_map(), for work enqueued on the
  // stream from here on. Call it before the plan of a pass, outside of captures. The slot map's
  // memory may be changed again as soon as it returns. On the CPU there is nothing to do.
  virtual void publish(Stream stream) = 0;
};

// full_slots: slots of the pool whose numbering requests use, a multiple of the page size. Needs
// spec.window > 0. Memory and errors as make_kv_pool.
std::unique_ptr<WindowKvPool> make_window_kv_pool(const KvCacheSpec& spec, int64_t pages,
                                                  int64_t full_slots, Device device = {});

// How much of a cached prefix (its full pages, in order) a request can continue from: the longest
// number of tokens, a multiple of the page size, whose last window - 1 tokens are all mapped.
// Throws Error{invalid_argument} naming a page the full pool does not have.
int32_t usable_window_prefix(const WindowKvPool& pool, std::span<const int64_t> full_pages);

// Recurrent state of linear layers, in f32: one slot per request. Slot 0 is the dummy.
struct StateCacheSpec {
  int32_t layers = 0;
  int32_t conv_dim = 0;    // channels of the causal convolution
  int32_t conv_width = 0;  // taps; the state keeps conv_width - 1 inputs
  int32_t heads = 0;       // value heads
  int32_t rows = 0;        // gated_delta_net: value width; mamba2: head width
  int32_t columns = 0;     // gated_delta_net: key width; mamba2: state width

  // Over all layers. Throws Error{invalid_argument} naming the field that is out of range.
  size_t bytes_per_slot() const;
};

struct StateLayerView {
  float* conv = nullptr;   // [slots, conv_dim, conv_width - 1], oldest first
  float* state = nullptr;  // [slots, heads, rows, columns]
  int64_t conv_slot_stride = 0, state_slot_stride = 0;  // elements
  int32_t slots = 0;
};

class StatePool {
 public:
  virtual ~StatePool() = default;
  virtual const StateCacheSpec& spec() const = 0;
  // All but in_use() throw Error{invalid_argument} naming an index the pool does not have or a slot
  // that is not in use.
  virtual int32_t slots() const = 0;            // including slot 0
  virtual bool in_use(int32_t slot) const = 0;  // allocated; false for slots the pool lacks
  virtual StateLayerView layer(int32_t index) const = 0;
  virtual int32_t free_slots() const = 0;
  virtual std::optional<int32_t> allocate() = 0;  // zeroed; nullopt: full
  virtual void release(int32_t slot) = 0;
  virtual void copy(int32_t from, int32_t to) = 0;  // all layers: fork, snapshot, restore
};

// Zeroed memory on the CPU for `slots` slots (>= 2, slot 0 included), slots * bytes_per_slot bytes
// and alignment. Errors as make_kv_pool.
std::unique_ptr<StatePool> make_state_pool(const StateCacheSpec& spec, int32_t slots);

// [max_requests, max_context] -> token slot, zero where nothing is stored. Row 0 is the dummy that
// padded requests point to.
class RequestTable {
 public:
  // max_requests (>= 2) counts row 0. Error{invalid_argument} or {out_of_memory}.
  RequestTable(int32_t max_requests, int32_t max_context);

  std::optional<int32_t> allocate();  // nullopt: all rows in use. O(1).
  // Clears the row. Throws Error{invalid_argument} naming a row that is not in use.
  void release(int32_t row);

  // All that take a row throw Error{invalid_argument} naming one the table does not have.
  std::span<int32_t> row(int32_t index);  // [max_context]
  // For copies of the table: whoever writes slots of a row from `first` on says so, whoever copies
  // asks for the first position written since the row was last asked for; max_context: none.
  // `first` is in [0, max_context].
  void mark_changed(int32_t row, int32_t first);
  int32_t take_changed(int32_t row);
  const int32_t* data() const { return slots_.get(); }
  int64_t row_stride() const { return max_context_; }
  int32_t max_requests() const { return max_requests_; }
  int32_t max_context() const { return max_context_; }
  int32_t available() const { return static_cast<int32_t>(free_.size()); }

 private:
  void check_row(int32_t row) const;

  int32_t max_requests_;
  int32_t max_context_;
  std::unique_ptr<int32_t, void (*)(void*)> slots_;  // untouched rows cost no memory
  std::vector<int32_t> free_;
  std::vector<bool> in_use_;
  std::vector<int32_t> changed_;  // [max_requests]
};

// Free pages and reference counts of one pool. Exhaustion is a value: every allocation is all or
// nothing. Misuse (a page that is free, reserved or out of range, a shared page about to be
// written) is Error{invalid_argument} naming the page.
class PageAllocator {
 public:
  // pages (>= 2) includes the reserved page 0; pages * page_size must stay below 2^31, else
  // Error{invalid_argument}. Error{out_of_memory} where the system has no memory for the lists.
  PageAllocator(int64_t pages, int32_t page_size);

  // One request grows from `prefix` to `length` tokens; last_slot is the slot of token prefix-1
  // (-1 when prefix is 0). Fills the tail of that page, then whole pages. Appends length - prefix
  // slots to `slots`. A tail page that is partly filled must be owned by this request alone. False:
  // nothing was taken.
  bool extend(int32_t prefix, int32_t length, int64_t last_slot, std::vector<int64_t>& slots);

  // Whole pages, reference count 1.
  bool allocate(int64_t count, std::vector<int64_t>& pages);

  void retain(int64_t page);   // one more owner
  void release(int64_t page);  // one owner less; the page is free at zero
  // Releases every page that holds one of these slots, once per page. The slots are those of
  // consecutive tokens of one owner.
  void release_slots(std::span<const int32_t> slots);
  // One request shrinks to its first `length` tokens: releases the pages that hold none of them.
  // slots: those of all its tokens. The rest of the tail page stays its own, so that extend(length,
  // ...) continues there. Undoes extend for rejected drafts and for a step that could not run.
  void truncate(std::span<const int32_t> slots, int32_t length);

  void check_owned(int64_t page) const;    // the error above for a page without an owner
  int32_t references(int64_t page) const;  // owners of a page in [0, pages()); page 0 has none
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t pages() const { return static_cast<int64_t>(references_.size()); }
  int32_t page_size() const { return page_size_; }

 private:
  int32_t page_size_;
  std::vector<int64_t> free_;
  std::vector<int32_t> references_;
};

}  // namespace fovea
