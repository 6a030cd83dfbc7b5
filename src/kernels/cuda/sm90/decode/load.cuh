// SPDX-License-Identifier: Apache-2.0
// Rows of K and V into shared memory, rows of q into registers. Every warp fetches the keys it will work on
// by itself: it walks through the work list ahead of the computation, across items, so that its copies never
// pause. Rows that no key of the item owns are zero: nothing of another request, and no NaN of an unused
// slot, reaches a product.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/sm90/decode/config.cuh"

namespace fovea::kernels::cuda {

// What one CTA works on. Its warps are dealt to the item's heads in turn.
struct Tile {
  DecodeItem item;
  RequestView view;
  int group;  // q heads of a kv head
  int rows;   // valid ones, at most the row tile

  __device__ int token_of(int row) const {
    const int packed = item.first_row + row;
    return packed < group ? 0 : packed / group;
  }
  // `head`: of the item, from 0.
  __device__ int q_head_of(int head, int row) const {
    const int packed = item.first_row + row;
    return (item.kv_head + head) * group + (packed < group ? packed : packed % group);
  }
};

// A scale that all keys of a head share, or 1.
__device__ inline float shared_scale(const KeyParams& keys, const float* scale, int kv_head) {
  return scale && keys.scale_slot_stride == 0 ? scale[kv_head * keys.scale_head_stride] : 1.0f;
}

// Asking L2 for 128 bytes at once made large batches 2.5 % faster, for 256 bytes 1 % (H200, 2026-11-21).
__device__ inline void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}
__device__ inline void copy_async_4(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}

// How a warp copies rows of kBytes: `lanes` neighbouring lanes copy one.
template <int kBytes>
struct RowCopy {
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kLanes = power_of_two_at_least(kChunks) < 32 ? power_of_two_at_least(kChunks) : 32;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kChunks <= 32);

  __device__ static int row() { return threadIdx.x % 32 / kLanes; }
  __device__ static int byte() { return threadIdx.x % 32 % kLanes * 16; }
  __device__ static void copy(char* to, const char* from, bool live) {
    if (kChunks == kLanes || byte() < kBytes) copy_async_16(to, from, live ? 16 : 0);
  }

  // 16 rows that follow one another in memory, `valid` of which exist; `first` is the lane's byte of row 0.
  __device__ static void copy_neighbours(const char* first, int64_t row_stride, int valid, int live_bytes,
                                         char* to, int pitch) {
    const char* from = first + row() * row_stride;
    char* into = to + row() * pitch + byte();
    const int rows = byte() < live_bytes ? valid : 0;
#pragma unroll
    for (int i = 0; i < 16; i += kRowsAtOnce) {
      copy(into + i * pitch, from, i + row() < rows);
      from += kRowsAtOnce * row_stride;
    }
  }

  // Rows anywhere: row r begins where lane r says, -1 is none.
  template <int kKeys>
  __device__ static void copy_scattered(const char* source, int64_t offset, int live_bytes, char* to,
                                        int pitch) {
#pragma unroll 4
    for (int i = 0; i < kKeys; i += kRowsAtOnce) {
      const int64_t at = __shfl_sync(~0u, offset, i + row());
      const bool live = at >= 0 && byte() < live_bytes;
      copy(to + (i + row()) * pitch + byte(), source + (live ? at + byte() : 0), live);
    }
  }
};

// Walks through the tiles of one warp.
template <class C>
class Loader {
 public:
  __device__ Loader(const DecodeParams& params, const DecodeRange& range)
      : params_(params), item_(range.begin), item_end_(range.end) {
    const int size = params.keys.page_size;
    page_shift_ = (size & (size - 1)) == 0 ? 31 - __clz(size) : -1;
    neighbours_ = !params.keys.page_table || size % 16 == 0;
    start_item(range.first);
    if (key_ >= key_end_) next_item();
  }

  // Starts the copies of the next tile, if there is one, and closes the group.
  __device__ void copy_next(typename C::Stage& stage) {
    if (item_ < item_end_) {
      if (neighbours_ && key_ % 16 == 0) {
        copy_neighbours(stage);
      } else {
        copy_scattered(stage);
      }
      if constexpr (C::kFp8) copy_scales(stage);
      key_ += key_step_;
      if (key_ < key_end_) {
        read_entry();
      } else {
        next_item();
      }
    }
    commit_copies();
  }

 private:
  static constexpr int kBytes = type_bytes(C::kKv);
  using CopyK = RowCopy<C::kKBytes>;
  using CopyV = RowCopy<C::kVBytes>;

  __device__ int page_of(int key) const {
    return page_shift_ >= 0 ? key >> page_shift_ : key / params_.keys.page_size;
  }
  __device__ int place_of(int key) const { return key - page_of(key) * params_.keys.page_size; }

  __device__ void copy_neighbours(typename C::Stage& stage) {
    const KeyParams& keys = params_.keys;
#pragma unroll
    for (int m = 0; m < C::kKeys; m += 16) {
      const int64_t page = __shfl_sync(~0u, entry_, m);
      const int64_t place = keys.page_table ? place_of(key_ + m) : 0;
      const int valid = key_end_ - key_ - m;
      if (valid <= 0 && m > 0) {
        // Nothing to copy, but what lies here must be zero.
        CopyV::copy_neighbours(v_, 0, 0, 0, stage.v[m], C::kVPitch);
        CopyK::copy_neighbours(k_, 0, 0, 0, stage.k[m], C::kKPitch);
        continue;
      }
      const char* k = k_ + (page * k_page_stride_ + place * keys.k_token_stride) * kBytes;
      const char* v = v_ + (page * v_page_stride_ + place * keys.v_token_stride) * kBytes;
      CopyK::copy_neighbours(k + CopyK::byte(), keys.k_token_stride * kBytes, valid,
                             params_.head_dim * kBytes, stage.k[m], C::kKPitch);
      CopyV::copy_neighbours(v + CopyV::byte(), keys.v_token_stride * kBytes, valid,
                             params_.head_dim_v * kBytes, stage.v[m], C::kVPitch);
    }
  }

  __device__ void copy_scattered(typename C::Stage& stage) {
    const KeyParams& keys = params_.keys;
    const int key = key_ + threadIdx.x % 32 % C::kKeys;
    int64_t k_at = -1;
    int64_t v_at = -1;
    if (key < key_end_) {
      const int64_t page = entry_;
      const int64_t place = keys.page_table ? place_of(key) : 0;
      k_at = (page * k_page_stride_ + place * keys.k_token_stride) * kBytes;
      v_at = (page * v_page_stride_ + place * keys.v_token_stride) * kBytes;
    }
    CopyK::template copy_scattered<C::kKeys>(k_, k_at, params_.head_dim * kBytes, stage.k[0], C::kKPitch);
    CopyV::template copy_scattered<C::kKeys>(v_, v_at, params_.head_dim_v * kBytes, stage.v[0], C::kVPitch);
  }

  __device__ void copy_scales(typename C::Stage& stage) {
    const KeyParams& keys = params_.keys;
    const int lane = threadIdx.x % 32;
    if (keys.scale_slot_stride == 0 || !keys.k_scale || lane >= C::kKeys) return;
    const int key = key_ + lane;
    int64_t at = 0;
    if (key < key_end_) {
      const int64_t slot = static_cast<int64_t>(entry_) * keys.page_size + place_of(key);
      at = slot * keys.scale_slot_stride + static_cast<int64_t>(kv_head_) * keys.scale_head_stride;
    }
    const int bytes = key < key_end_ ? 4 : 0;
    copy_async_4(&stage.scales[0][lane], keys.k_scale + at, bytes);
    copy_async_4(&stage.scales[1][lane], keys.v_scale + at, bytes);
  }

  // The page of this lane's key, one tile ahead of its use.
  __device__ void read_entry() {
    const int key = key_ + threadIdx.x % 32 % C::kKeys;
    if (key >= key_end_) return;
    entry_ = params_.keys.page_table ? __ldg(table_row_ + page_of(key)) : packed_begin_ + key;
  }

  __device__ void start_item(const DecodeItem& item) {
    const KeyParams& keys = params_.keys;
    const int warp = threadIdx.x / 32;
    key_ = item.key_begin + warp / item.heads * C::kKeys;
    key_end_ = item.key_end;
    if (key_ >= key_end_) return;
    key_step_ = C::kWarps / item.heads * C::kKeys;
    kv_head_ = item.kv_head + warp % item.heads;
    k_ = static_cast<const char*>(keys.k) + kv_head_ * keys.k_head_stride * kBytes;
    v_ = static_cast<const char*>(keys.v) + kv_head_ * keys.v_head_stride * kBytes;
    if (keys.page_table) {
      table_row_ = keys.page_table + item.request * keys.page_table_stride;
      k_page_stride_ = keys.k_page_stride;
      v_page_stride_ = keys.v_page_stride;
    } else {
      packed_begin_ = keys.kv_indptr[item.request];
      k_page_stride_ = keys.k_token_stride;
      v_page_stride_ = keys.v_token_stride;
    }
    read_entry();
  }

  // To the next item that has a tile for this warp.
  __device__ void next_item() {
    while (++item_ < item_end_) {
      start_item(params_.list.items[item_]);
      if (key_ < key_end_) return;
    }
  }

  const DecodeParams& params_;
  int item_;
  const int item_end_;
  int page_shift_;
  bool neighbours_;  // are the keys of an aligned 16 in one page?
  int key_ = 0;
  int key_end_ = 0;
  int key_step_ = 0;
  int kv_head_ = 0;
  int entry_ = 0;
  int packed_begin_ = 0;
  const char* k_ = nullptr;  // of the head
  const char* v_ = nullptr;
  const int32_t* table_row_ = nullptr;
  int64_t k_page_stride_ = 0;
  int64_t v_page_stride_ = 0;
};

// Two 16-bit values of type kFrom as f32.
template <Type kFrom>
__device__ inline float2 unpack(uint32_t two) {
  if constexpr (kFrom == bf16) {
    return {__int_as_float(two << 16), __int_as_float(two & 0xffff0000)};
  } else {
    float low, high;
    asm("{.reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(two));
    return {low, high};
  }
}

// The query rows of one warp's head as right operands: lane l has row l / 4 of every eight.
template <class C>
struct Queries {
  uint32_t fragments[C::kHeadDim / 16][C::kColumns][2];

  // As they lie in memory. With an fp8 cache a fragment's four values are neighbours: in that order fp8
  // values come out of a register.
  __device__ void read(const DecodeParams& params, const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int head = static_cast<int>(threadIdx.x) / 32 % tile.item.heads;
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      const int row = n * 8 + lane / 4;
      const bool valid = row < tile.rows;
      const auto* q = static_cast<const uint16_t*>(params.q);
      if (valid) {
        q += (tile.view.q_begin + tile.token_of(row)) * params.q_token_stride +
             tile.q_head_of(head, row) * params.q_head_stride;
      }
#pragma unroll
      for (int d = 0; d < C::kHeadDim; d += 16) {
        uint32_t(&pair)[2] = fragments[d / 16][n];
        const int column = d + lane % 4 * (C::kFp8 ? 4 : 2);
        const bool live = valid && d < params.head_dim;
        pair[0] = pair[1] = 0;
        if constexpr (C::kFp8) {
          if (live && column < params.head_dim) {
            const uint2 four = *reinterpret_cast<const uint2*>(q + column);
            pair[0] = four.x;
            pair[1] = four.y;
          }
        } else {
          if (live) pair[0] = *reinterpret_cast<const uint32_t*>(q + column);
          if (live && d + 8 < params.head_dim) pair[1] = *reinterpret_cast<const uint32_t*>(q + column + 8);
        }
      }
    }
  }

  // With an fp8 cache: to f16, relative to a power of two near the row's largest value. unit[n] is that of
  // row 8n + lane / 4.
  __device__ void normalise(float (&unit)[C::kColumns]) {
#pragma unroll
    for (int n = 0; n < C::kColumns; ++n) {
      float most = 0;
#pragma unroll
      for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
        for (const uint32_t two : fragments[d][n]) {
          const float2 values = unpack<C::kQ>(two);
          most = fmaxf(most, fmaxf(fabsf(values.x), fabsf(values.y)));
        }
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // The exponent alone: 2^e <= most < 2^(e + 1).
      unit[n] = __int_as_float(__float_as_int(most) & 0x7f800000);
      if (!(unit[n] > 0) || unit[n] == infinity()) unit[n] = 1;
      const float factor = 1 / unit[n];
#pragma unroll
      for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
        for (uint32_t& two : fragments[d][n]) {
          const float2 values = unpack<C::kQ>(two);
          two = pack<f16>(values.x * factor, values.y * factor);
        }
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
