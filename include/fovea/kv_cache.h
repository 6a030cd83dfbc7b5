// SPDX-License-Identifier: Apache-2.0
// Storage of keys, values and recurrent states: ownership of slots, and their bytes.
//
// A *slot* holds one token in a pool; a *page* is page_size consecutive slots. A request owns a row
// of the RequestTable that lists the slot of each of its tokens, with the invariant
// slot % page_size == position % page_size. Page 0 is a dummy that is never allocated: padding
// reads and writes it, and its content stays finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fovea/api.h"
#include "fovea/device.h"
#include "fovea/dtype.h"

namespace FOVEA_API fovea {

enum class KvLayout : uint8_t {
  mha,           // separate K and V, [slot, kv_head, dim]
  mla,           // one row per slot: latent, then rotary key, of one dtype
  mla_fp8_rows,  // 656-byte rows: 512 e4m3, 4 f32 scales (one per 128), 64 bf16 rotary values
};

// The scales of a quantised cache. x is stored as round(x / scale), saturated.
enum class KvScale : uint8_t {
  none,            // scale 1
  per_tensor,      // one for K and one for V of a layer, set by the caller
  per_head,        // [kv_heads] for K and for V, set by the caller
  per_token_head,  // [slots, kv_heads] for K and for V, computed when a token is written
};

// Physical order inside a page; the logical shape is the same. On the CPU, decode reads hnd faster.
enum class KvOrder : uint8_t {
  nhd,  // [page, token, head, dim]
  hnd,  // [page, head, token, dim]
};

struct KvCacheSpec {
  KvLayout layout = KvLayout::mha;
  KvOrder order = KvOrder::nhd;
  DType dtype = DType::f32;  // mla_fp8_rows: f8e4m3
  KvScale scale = KvScale::none;
  int32_t layers = 0;
  int32_t kv_heads = 0;    // mla: 1
  int32_t head_dim = 0;    // width of a K row; mla: kv_lora_rank + rope_dim
  int32_t head_dim_v = 0;  // width of a V row; mla: kv_lora_rank, the front of the K row
  int32_t page_size = 1;   // tokens, >= 1
  int32_t window = 0;      // > 0: a sliding-window pool addressed through slot_map()

  // Returns the bytes over all layers, including scales per token. Throws Error{invalid_argument}
  // naming the field that is out of range.
  size_t bytes_per_page() const;
};

// Returns true if a cache of MLA layers can have KvLayout::mla_fp8_rows, whatever layout the spec
// names: a latent of 512 and a rotary key of 64 values, f8e4m3, scale none.
bool fits_mla_fp8_rows(const KvCacheSpec& spec);

// The cache of one layer. Element (slot, head) of K is at
//   k + ((slot / page_size) * k_page_stride + (slot % page_size) * k_token_stride
//        + head * k_head_stride) * dtype_bytes(dtype)
// and V likewise; the values of a head are contiguous. mla: v aliases k. mla_fp8_rows: strides are
// in bytes.
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
  // per_tensor: [1]; per_head: [kv_heads]; the caller sets both before the first write.
  // per_token_head: [slots, kv_heads], written with the rows. none: null. An mla row has one scale:
  // v_scale aliases k_scale.
  float* k_scale = nullptr;
  float* v_scale = nullptr;
};

// Return the byte address of a (slot, head) row.
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

// The bytes of K and V for all layers of one group. Implement it to lend memory that you own;
// make_kv_pool() allocates a pool. Views stay valid and unchanged for the pool's life; a backend
// checks them against spec() when it is created. All addresses are memory of the pool's device. On
// a GPU, addresses and strides of k and v are multiples of 16 bytes.
class KvPool {
 public:
  virtual ~KvPool() = default;
  virtual const KvCacheSpec& spec() const = 0;
  virtual int64_t pages() const = 0;  // including page 0
  // True if only padding uses page 0. A pool of lent memory returns false if its owner gives page 0
  // to requests, too. Padding over such a pool has lengths of 0 and slots of -1. In both cases page
  // 0 receives finite values only: NaN is stored as 0, an infinity as the largest finite value.
  virtual bool reserves_page_zero() const { return true; }
  // Throws Error{invalid_argument} naming an index the pool does not have.
  virtual KvLayerView layer(int32_t index) const = 0;
  virtual Device device() const { return {}; }
  // Sliding-window pools: [slots of the full pool] -> slot of this pool, -1 if the token has left
  // the window. Empty: slots are this pool's own. Host memory.
  virtual std::span<const int64_t> slot_map() const { return {}; }
  // The same array in the pool's device memory, for kernels; null if slot_map() is empty.
  virtual const int64_t* device_slot_map() const { return slot_map().data(); }
};

// Allocates zeroed memory on `device` for `pages` pages (>= 2, page 0 included). Scales per_tensor
// and per_head start at 1. On the CPU, memory that is never written takes only address space.
// spec.window must be 0. Throws Error{invalid_argument} naming the field, Error{out_of_memory}
// naming the bytes or Error{unsupported} with the reason why there is no such GPU.
std::unique_ptr<KvPool> make_kv_pool(const KvCacheSpec& spec, int64_t pages, Device device = {});

// Returns the bytes that make_kv_pool or, with full_slots > 0, make_window_kv_pool allocates: pages
// * bytes_per_page, alignment, fixed scales and the slot map.
size_t kv_pool_bytes(const KvCacheSpec& spec, int64_t pages, int64_t full_slots = 0);

// Returns the same cache with smaller pages of `page_size` tokens: slots keep their numbers, and
// page p becomes the pages p * n ... p * n + n - 1, n = view.page_size / page_size. nullopt:
// page_size does not divide the view's, or the order is hnd with several heads.
std::optional<KvLayerView> split_pages(const KvLayerView& view, int32_t page_size);

// A pool of window layers. Its slots are translated from those of a full pool. It holds only tokens
// inside the window of some request, so it needs far fewer pages than the full pool.
//
// A full page with any mapped slot owns one window page, and slots keep their place in the page:
// slot_map()[s] % page_size == s % page_size. So a page table of window pages is well defined for
// the pages that hold the window. A window page becomes free when the last of its slots is
// unmapped. A request that unmaps slots as they leave its window holds at most
// ceil((window - 1 + new tokens) / page_size) + 1 pages. Page 0 maps to page 0.
//
// The pool does not know the windows of requests. If requests share full pages, a page that has
// left one window may still be inside another; the caller must unmap it only after its last user.
class WindowKvPool : public KvPool {
 public:
  // Maps slots of the full pool; slots that are mapped already keep their place. Returns false, and
  // maps nothing, if the pool is full.
  virtual bool map(std::span<const int64_t> full_slots) = 0;
  // Unmaps slots that have left every window or that their owner has freed. Slots that are not
  // mapped are ignored.
  virtual void unmap(std::span<const int64_t> full_slots) = 0;
  virtual void unmap(std::span<const int32_t> full_slots) = 0;  // part of a request's row
  virtual void unmap_pages(std::span<const int64_t> full_pages) = 0;
  virtual int64_t free_pages() const = 0;
  // On a GPU: copies changes of map() and unmap() to device_slot_map(), for work that is enqueued
  // on the stream afterwards. Call it before plan(), outside of captures. map() and unmap() may be
  // called again as soon as it returns. On the CPU it does nothing.
  virtual void publish(Stream stream) = 0;
};

// Allocates a window pool. full_slots: slots of the full pool, a multiple of the page size.
// spec.window must be positive. Memory and errors as make_kv_pool.
std::unique_ptr<WindowKvPool> make_window_kv_pool(const KvCacheSpec& spec, int64_t pages,
                                                  int64_t full_slots, Device device = {});

// Returns the part of a cached prefix (given by its full pages, in order) that a request can
// continue from: the largest multiple of the page size whose last window - 1 tokens are all mapped.
// Throws Error{invalid_argument} naming a page that the full pool does not have.
int32_t usable_window_prefix(const WindowKvPool& pool, std::span<const int64_t> full_pages);

inline constexpr int32_t kMaxSlotDrafts = 64;

// Recurrent states of linear layers, one slot per request. Slot 0 is the dummy. Layers of kind
// short_conv have windows only: heads, rows and columns are 0.
struct StateCacheSpec {
  int32_t layers = 0;
  int32_t conv_dim = 0;    // channels of the causal convolution, conv_dim_of()
  int32_t conv_width = 0;  // taps; the state keeps conv_width - 1 inputs
  int32_t heads = 0;       // LinearSpec::value_heads
  int32_t rows = 0;        // LinearSpec::value_dim
  int32_t columns = 0;     // LinearSpec::key_dim
  // Type of the recurrent states: f32, bf16 or f16. In 16 bits they are rounded after every token
  // of a batch_invariant spec, else in every pass. Windows of the convolution are f32.
  DType dtype = DType::f32;
  // Drafts whose inputs a slot keeps (LinearBatch::draft_counts), kMaxSlotDrafts at most; 0: none.
  int32_t max_drafts = 0;
  int32_t draft_inputs = 0;  // values of a kept draft: draft_row(spec of the layers).size

  // Returns the bytes over all layers. Throws Error{invalid_argument} naming the field that is out
  // of range.
  size_t bytes_per_slot() const;
};

struct StateLayerView {
  float* conv = nullptr;  // [slots, conv_dim, conv_width - 1], oldest first
  void* state = nullptr;  // [slots, heads, rows, columns] of StateCacheSpec::dtype
  int64_t conv_slot_stride = 0, state_slot_stride = 0;  // elements
  int32_t slots = 0;
  // [slots, 2 * max_drafts, draft_inputs] inputs of drafts, dense; null if the pool keeps none.
  // Backends write them; their contents belong to the backend and the device.
  float* drafts = nullptr;

  // Returns the states as elements of T, the type that the spec's dtype names.
  template <typename T>
  T* state_as() const {
    return static_cast<T*>(state);
  }
};

// The contents of a slot of a pool that keeps drafts, the same in all layers.
struct StateMark {
  int32_t tokens = 0;  // that the state and the window include
  int32_t drafts = 0;  // kept behind them
  int32_t row = 0;     // the first one's; row 0 follows row 2 * max_drafts - 1
};

class StatePool {
 public:
  virtual ~StatePool() = default;
  virtual const StateCacheSpec& spec() const = 0;
  // All functions but in_use() throw Error{invalid_argument} naming an index that the pool does not
  // have or a slot that is not in use.
  virtual int32_t slots() const = 0;            // including slot 0
  virtual Device device() const { return {}; }  // where the states are
  virtual bool in_use(int32_t slot) const = 0;  // false for slots that the pool does not have
  virtual StateLayerView layer(int32_t index) const = 0;
  // [slots] in memory of device(); null if the pool keeps no drafts. plan() reads and writes them.
  virtual StateMark* marks() const { return nullptr; }
  virtual int32_t free_slots() const = 0;
  virtual std::optional<int32_t> allocate() = 0;  // zeroed; nullopt: full
  virtual void release(int32_t slot) = 0;
  // All layers, kept drafts too: fork, snapshot, restore.
  virtual void copy(int32_t from, int32_t to) = 0;
  // On a GPU: enqueues what allocate() and copy() do to the states since the last call, in their
  // order, for work that is enqueued on the stream afterwards. Call it before plan(), outside of
  // captures. On the CPU it does nothing.
  virtual void publish(Stream /*stream*/) {}
};

// Allocates zeroed memory on `device` for `slots` slots (>= 2, slot 0 included): slots *
// bytes_per_slot bytes and alignment. Errors as make_kv_pool.
std::unique_ptr<StatePool> make_state_pool(const StateCacheSpec& spec, int32_t slots,
                                           Device device = {});

// Where the tokens of requests are stored: a row per request, an entry per token or per page. On a
// GPU the entries are device memory.
struct TokenTable {
  const int32_t* entries = nullptr;  // [rows, stride]; null: there is no table
  int64_t stride = 0;                // entries per row; a row holds stride * entry_tokens tokens
  // Tokens per entry: 1 if entries are slots, the page size if they are pages (the block table of
  // other engines).
  int32_t entry_tokens = 1;
  int32_t rows = 0;

  explicit operator bool() const { return entries != nullptr; }
  // The entry that holds a token, and the slot of a token. Host memory only.
  int32_t entry(int32_t row, int64_t token) const {
    return entries[row * stride + token / entry_tokens];
  }
  int64_t slot(int32_t row, int64_t token) const {
    return int64_t{entry(row, token)} * entry_tokens + token % entry_tokens;
  }
};

// The slots of each request's tokens, [max_requests, max_context] in host memory; 0 if no token is
// stored. Row 0 is the dummy of padded requests.
class RequestTable {
 public:
  // max_requests (>= 2) counts row 0. Throws Error{invalid_argument} or {out_of_memory}.
  RequestTable(int32_t max_requests, int32_t max_context);

  std::optional<int32_t> allocate();  // nullopt: all rows are in use. O(1).
  // Clears the row. Throws Error{invalid_argument} naming a row that is not in use.
  void release(int32_t row);

  // All functions that take a row throw Error{invalid_argument} naming a row that the table does
  // not have.
  std::span<int32_t> row(int32_t index);  // [max_context]
  // Tracks changes for copies of the table. Call mark_changed() after writing slots of a row from
  // position `first` (in [0, max_context]) on. take_changed() returns the first position that
  // changed since its last call for the row; max_context: none.
  void mark_changed(int32_t row, int32_t first);
  int32_t take_changed(int32_t row);
  // The whole table, for BatchView::table.
  TokenTable table() const { return {slots_.get(), max_context_, 1, max_requests_}; }
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

// Free pages and reference counts of one pool. Allocations take everything or nothing and report
// exhaustion by their result. Misuse throws Error{invalid_argument} naming the page: a page that is
// free, reserved or out of range, or a shared page that would be written.
class PageAllocator {
 public:
  // `pages` (>= 2) includes the reserved page 0; pages * page_size must be less than 2^31. Throws
  // Error{invalid_argument} or {out_of_memory}.
  PageAllocator(int64_t pages, int32_t page_size);

  // Extends a request from `prefix` to `length` tokens: appends length - prefix slots to `slots`,
  // from the tail of the request's last page and then from new pages. last_slot is the slot of
  // token prefix - 1 (-1 if prefix is 0). If the last page is partly filled, only this request may
  // own it. Returns false, and takes nothing, if there are too few pages.
  bool extend(int32_t prefix, int32_t length, int64_t last_slot, std::vector<int64_t>& slots);

  // Appends `count` pages with a reference count of 1. Returns false, and takes nothing, if there
  // are too few.
  bool allocate(int64_t count, std::vector<int64_t>& pages);

  void retain(int64_t page);   // adds an owner
  void release(int64_t page);  // removes an owner; a page without owners is free
  // Releases every page that holds one of these slots, once per page. The slots are those of
  // consecutive tokens of one owner.
  void release_slots(std::span<const int32_t> slots);
  // Shrinks a request to its first `length` tokens: releases the pages that hold none of them.
  // `slots` are those of all its tokens. The request keeps the rest of its tail page, and
  // extend(length, ...) continues there. Rolls back extend() for rejected drafts and for a step
  // that could not run.
  void truncate(std::span<const int32_t> slots, int32_t length);

  void check_owned(int64_t page) const;    // throws the error above for a page without an owner
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
