// SPDX-License-Identifier: Apache-2.0
// Where the keys and values of a tile lie, and conversion of their rows to f32.
#pragma once

#include "kernels/cpu/simd/attention/work.h"
#include "kernels/cpu/simd/convert.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

inline int64_t element_bytes(DType dtype) { return static_cast<int64_t>(dtype_bytes(dtype)); }

inline int32_t padded(int32_t count) { return (count + kPadFloats - 1) / kPadFloats * kPadFloats; }

// Addresses of the rows of a tile for kv head 0; the next head is k_head_bytes or v_head_bytes
// further. Only entries [begin, end) are set.
struct TileKeys {
  int32_t begin, end;  // the item's keys, counted from the first key of the tile
  const char* k[kTileKeys];
  const char* v[kTileKeys];
  int64_t scale[kTileKeys];  // index of the scale of head 0
  int32_t run[kTileKeys];    // keys from this one on that are evenly spaced
};

// Computes the addresses of one request's keys.
class KeyReader {
 public:
  KeyReader(const AttentionParams& params, int32_t request)
      : keys_(params.keys), kv_heads_(params.kv_heads), request_(request) {
    const KvLayerView& cache = keys_.cache;
    if (keys_.page_table) {
      k_dtype = v_dtype = cache.dtype;
      page_size = cache.page_size;
      k_head_bytes = cache.k_head_stride * element_bytes(cache.dtype);
      v_head_bytes = cache.v_head_stride * element_bytes(cache.dtype);
      fp8_rows = cache.layout == KvLayout::mla_fp8_rows;
      v_in_k = cache.layout != KvLayout::mha;
      if (v_in_k) v_head_bytes = k_head_bytes;
    } else {
      k_dtype = keys_.k.dtype;
      v_dtype = keys_.v.dtype;
      k_head_bytes = keys_.k.head_stride * element_bytes(k_dtype);
      v_head_bytes = keys_.v.head_stride * element_bytes(v_dtype);
    }
    k_row_bytes = fp8_rows ? kMlaRowBytes : params.head_dim * element_bytes(k_dtype);
    v_row_bytes = v_in_k ? 0 : params.head_dim_v * element_bytes(v_dtype);
    k_token_bytes = (keys_.page_table ? keys_.cache.k_token_stride : keys_.k.token_stride) *
                    element_bytes(k_dtype);
    v_token_bytes = (keys_.page_table ? keys_.cache.v_token_stride : keys_.v.token_stride) *
                    element_bytes(v_dtype);
  }

  // Locates keys [begin, end) of the tile whose first key is `tile_begin`.
  void locate(int32_t tile_begin, int32_t begin, int32_t end, TileKeys& to) const {
    to.begin = begin;
    to.end = end;
    if (keys_.page_table) {
      locate_pages(tile_begin, to);
    } else {
      locate_packed(tile_begin, to);
    }
  }

  // Prefetches the scales per token and head, from `head` on.
  void prefetch_scales(const TileKeys& tile, int64_t head) const {
    const KvLayerView& cache = keys_.cache;
    for (int32_t n = tile.begin; n < tile.end; ++n) {
      const int64_t at = tile.scale[n] + head;
      __builtin_prefetch(cache.k_scale + at, 0, 2);
      if (!v_in_k) __builtin_prefetch(cache.v_scale + at, 0, 2);
    }
  }

  DType k_dtype, v_dtype;
  int64_t k_head_bytes, v_head_bytes;
  int64_t k_row_bytes, v_row_bytes;
  int64_t k_token_bytes, v_token_bytes;
  int32_t page_size = 0;  // 0: keys are not paged
  bool fp8_rows = false;  // KvLayout::mla_fp8_rows
  bool v_in_k = false;    // v is the front of the k row

 private:
  void locate_pages(int32_t tile_begin, TileKeys& to) const {
    const KvLayerView& cache = keys_.cache;
    const int32_t* pages = keys_.page_table + request_ * keys_.page_table_stride;
    const int64_t bytes = element_bytes(cache.dtype);
    for (int32_t n = to.begin; n < to.end;) {
      const int32_t entry = (tile_begin + n) / cache.page_size;
      int32_t in_page = (tile_begin + n) % cache.page_size;
      const int64_t page = pages[entry];
      const int32_t last = smaller(to.end, n + cache.page_size - in_page);
      for (; n < last; ++n, ++in_page) {
        to.run[n] = last - n;
        to.k[n] = cache.k + (page * cache.k_page_stride + in_page * cache.k_token_stride) * bytes;
        to.v[n] = v_in_k ? to.k[n]
                         : cache.v + (page * cache.v_page_stride + in_page * cache.v_token_stride) *
                                         bytes;
        to.scale[n] = (page * cache.page_size + in_page) * kv_heads_;
      }
    }
  }

  void locate_packed(int32_t tile_begin, TileKeys& to) const {
    const int64_t first = static_cast<int64_t>(keys_.kv_indptr[request_]) + tile_begin;
    for (int32_t n = to.begin; n < to.end; ++n) {
      to.run[n] = to.end - n;
      to.k[n] = static_cast<const char*>(keys_.k.data) +
                (first + n) * keys_.k.token_stride * element_bytes(k_dtype);
      to.v[n] = static_cast<const char*>(keys_.v.data) +
                (first + n) * keys_.v.token_stride * element_bytes(v_dtype);
    }
  }

  const KeySource& keys_;
  int32_t kv_heads_;
  int32_t request_;
};

// Loads a row of 656 bytes: 512 e4m3 values, four f32 scales, 64 bf16 values.
inline void load_mla_fp8_row(const char* from, float* to) {
  constexpr int32_t kLatent = 512, kPerScale = 128, kRope = 64;
  float scales[kLatent / kPerScale];
  memcpy(scales, from + kLatent, sizeof(scales));
  for (int32_t d = 0; d < kLatent; d += kLanes) {
    const F32 value = load(reinterpret_cast<const F8E4m3*>(from + d));
    store(hn::Mul(value, hn::Set(kF32, scales[d / kPerScale])), to + d);
  }
  load_row(reinterpret_cast<const Bf16*>(from + kLatent + sizeof(scales)), kRope, kRope,
           to + kLatent);
}

// Calls function(pointer) with `from` as a pointer to elements of dtype.
template <class Function>
HWY_INLINE void with_type(const char* from, DType dtype, const Function& function) {
  switch (dtype) {
    case DType::f16:
      return function(reinterpret_cast<const F16*>(from));
    case DType::bf16:
      return function(reinterpret_cast<const Bf16*>(from));
    case DType::f8e4m3:
      return function(reinterpret_cast<const F8E4m3*>(from));
    case DType::f8e5m2:
      return function(reinterpret_cast<const F8E5m2*>(from));
    default:
      return function(reinterpret_cast<const float*>(from));
  }
}

// Loads `count` elements as f32 and pads them with zeros to padded(count).
inline void load_any_row(const char* from, DType dtype, int32_t count, float* to) {
  with_type(from, dtype, [&](const auto* typed) { load_row(typed, count, padded(count), to); });
}

inline void store_any_row(const float* from, int32_t count, DType dtype, char* to) {
  switch (dtype) {
    case DType::f16:
      return store_row(from, count, reinterpret_cast<F16*>(to));
    case DType::bf16:
      return store_row(from, count, reinterpret_cast<Bf16*>(to));
    default:
      return store_row(from, count, reinterpret_cast<float*>(to));
  }
}

inline const char* head_row(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<const char*>(rows.data) +
         (token * rows.token_stride + head * rows.head_stride) * element_bytes(rows.dtype);
}

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
