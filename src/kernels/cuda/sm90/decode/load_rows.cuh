// SPDX-License-Identifier: Apache-2.0
// The copies of K and V if pages are too small for boxes: single rows.
#pragma once

#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

// Every computing warp copies the rows of its own tiles, as many steps ahead as there are stages.
// Two dedicated warps would reach half the bandwidth, because at most 63 such copies of a warp are
// in flight. Rows without a key of the item become zero.
template <class C, bool kUsed>
class RowCopier {
 public:
  // May run before the wait.
  __device__ RowCopier(const DecodeParams& params, const DecodeItem& first,
                       typename C::SharedMemory& shared)
      : params_(params),
        shared_(shared),
        walk_(params, first, shared.range_begin, shared.range_end, {}) {}

  // Waits, unless older keys are known to be complete, and starts the first copies.
  __device__ void begin() {
    if (!params_.keys_complete) wait_for_previous_kernel();
#pragma unroll 1
    for (int s = 0; s < shared_.stages; ++s) copy_next();
  }

  // Copies the next step, of this or the next item, as one group of copies.
  __device__ void copy_next() {
    for (bool copied = false; !copied && !walk_.done(); walk_.advance()) {
      copied = !walk_.empty();
      if (copied) copy();
    }
    commit_copies();
    stage_ = stage_ + 1 == shared_.stages ? 0 : stage_ + 1;
  }

 private:
  static constexpr int kBytes = type_bytes(C::kKv);

  struct KeyOf {
    __device__ int operator()(const Steps<C>& steps, int step, int place) const {
      return steps.key_of(step, threadIdx.x / 32) + place;
    }
  };

  __device__ void copy() {
    const DecodeItem& item = walk_.item();
    const Steps<C> steps(item);
    const int warp = threadIdx.x / 32;
    const int key = steps.key_of(walk_.step(), warp) + threadIdx.x % 32 % C::kTile;
    const int entry = walk_.page(threadIdx.x % C::kTile);
    if (steps.key_of(walk_.step(), warp) >= steps.end) return;
    const bool live = key >= steps.begin && key < steps.end;
    if (__any_sync(~0u, live && key >= walk_.new_keys())) wait_for_previous_kernel();
    const int head = item.kv_head + steps.head_of(warp);
    const KeyParams& keys = params_.keys;
    const bool paged = keys.page_table != nullptr;
    const int64_t page = paged ? entry : 0;
    const int64_t place = paged ? walk_.table().place_of(key) : entry + key;
    const auto row = [&](const void* rows, int64_t page_stride, int64_t token_stride,
                         int64_t head_stride) {
      const int64_t at = page * page_stride + place * token_stride + head * head_stride;
      return live ? reinterpret_cast<int64_t>(rows) + at * kBytes : kNowhere;
    };
    copy_tile<C::kKPieces>(row(keys.k, keys.k_page_stride, keys.k_token_stride, keys.k_head_stride),
                           params_.head_dim * kBytes, shared_.k[stage_].tiles[warp][0][0]);
    copy_tile<C::kVPieces>(row(keys.v, keys.v_page_stride, keys.v_token_stride, keys.v_head_stride),
                           params_.head_dim_v * kBytes, shared_.v[stage_].tiles[warp][0][0]);
    if (has_token_scales<C>(params_) && threadIdx.x % 32 < C::kTile) {
      const int64_t slot = page * keys.page_size + place;
      const int64_t at =
          live ? slot * keys.scale_slot_stride + static_cast<int64_t>(head) * keys.scale_head_stride
               : 0;
      const int to = place_of_scale(params_.batch, item, key - walk_.step(), steps.head_of(warp));
      copy_word_async(&shared_.k[stage_].scales[to], keys.k_scale + at, live ? 4 : 0);
      copy_word_async(&shared_.v[stage_].scales[to], keys.v_scale + at, live ? 4 : 0);
    }
  }

  static constexpr int64_t kNowhere = -4096;  // no address is negative

  // Copies a tile; lane l has the address of row l, or kNowhere. Lanes exchange whole addresses,
  // not offsets (chosen on H200, 2026-11-22: up to 3 % faster).
  template <int kPieces>
  __device__ static void copy_tile(int64_t row, int live_bytes, char* tile) {
    constexpr int kChunks = kPieces * (kPieceBytes / 16);
    constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // lanes that copy a row
    const int chunk = threadIdx.x % kLanes;
    const int sub = threadIdx.x % 32 / kLanes;
    const bool chunk_live = chunk * 16 < live_bytes;
    constexpr int kAtOnce = C::kRowTile > 8               ? 2  // as many as registers allow
                            : C::kHeadDim != C::kHeadDimV ? 1
                            : C::kHeadDim > 128           ? 2
                            : C::kFp8                     ? 4
                                                          : 8;
#pragma unroll kAtOnce
    for (int i = 0; i < C::kTile; i += 32 / kLanes) {
      const int64_t from = __shfl_sync(~0u, row, i + sub);
      if (chunk < kChunks) {
        copy_line_or_zero_async(tile + tile_offset<C>(i + sub, chunk),
                                reinterpret_cast<const char*>(from) + chunk * 16,
                                chunk_live && static_cast<int>(from >> 32) >= 0);
      }
    }
  }

  const DecodeParams& params_;
  typename C::SharedMemory& shared_;
  PagedSteps<C, C::kTile, KeyOf> walk_;
  int stage_ = 0;
};

// Does nothing if dedicated warps copy.
template <class C>
class RowCopier<C, false> {
 public:
  __device__ RowCopier(const DecodeParams&, const DecodeItem&, typename C::SharedMemory&) {}
  __device__ void begin() {}
  __device__ void copy_next() {}
};

}  // namespace fovea::kernels::cuda
