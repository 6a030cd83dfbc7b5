// SPDX-License-Identifier: Apache-2.0
// K and V where boxes do not fit: rows that may lie anywhere.
#pragma once

#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

// Asking L2 for 128 bytes at once made large batches 2.5 % faster, for 256 bytes 6 % slower (H200,
// 2026-11-21).
__device__ inline void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}

// Where boxes do not fit, every warp that computes copies the rows of its own tiles, which may lie
// anywhere, so many steps ahead as there are stages. (Two warps for all of them reached half the bandwidth:
// no more than 63 such copies of a warp are ever on their way.) What no key of the item owns becomes zero.
template <class C, bool kUsed>
class RowCopier {
 public:
  // May come before the wait.
  __device__ RowCopier(const DecodeParams& params, const DecodeItem& first, typename C::SharedMemory& shared)
      : params_(params), shared_(shared), walk_(params, first, shared.range_begin, shared.range_end, {}) {}

  // Waits, if nothing is known to be settled.
  __device__ void begin() {
    if (!params_.keys_settled) wait_for_previous_kernel();
#pragma unroll 1
    for (int s = 0; s < C::kStages; ++s) copy_next();
  }

  // Of the next step, whatever item it is of; one group of copies.
  __device__ void copy_next() {
    for (bool copied = false; !copied && !walk_.done(); walk_.advance()) {
      copied = !walk_.empty();
      if (copied) copy();
    }
    commit_copies();
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
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
    copy_tile<C::kKPieces>(static_cast<const char*>(keys.k) + head * keys.k_head_stride * kBytes,
              live ? (page * keys.k_page_stride + place * keys.k_token_stride) * kBytes : -1,
              params_.head_dim * kBytes, shared_.k[stage_].tiles[warp][0][0]);
    copy_tile<C::kVPieces>(static_cast<const char*>(keys.v) + head * keys.v_head_stride * kBytes,
              live ? (page * keys.v_page_stride + place * keys.v_token_stride) * kBytes : -1,
              params_.head_dim_v * kBytes, shared_.v[stage_].tiles[warp][0][0]);
    if (has_token_scales<C>(params_) && threadIdx.x % 32 < C::kTile) {
      const int64_t slot = page * keys.page_size + place;
      const int64_t at = live ? slot * keys.scale_slot_stride + static_cast<int64_t>(head) * keys.scale_head_stride : 0;
      const int to = place_of_scale(params_.batch, item, key - walk_.step(), steps.head_of(warp));
      copy_word_async(&shared_.k[stage_].scales[to], keys.k_scale + at, live ? 4 : 0);
      copy_word_async(&shared_.v[stage_].scales[to], keys.v_scale + at, live ? 4 : 0);
    }
  }

  // Lane l knows where row l begins, -1: nowhere.
  template <int kPieces>
  __device__ static void copy_tile(const char* rows, int64_t offset, int live_bytes, char* tile) {
    constexpr int kChunks = kPieces * (kPieceBytes / 16);
    constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // that copy a row
    const int chunk = threadIdx.x % kLanes;
    const int sub = threadIdx.x % 32 / kLanes;
    constexpr int kAtOnce = C::kRowTile > 8 || C::kHeadDim > 128 ? 2 : C::kFp8 ? 4 : 8;  // what registers allow
#pragma unroll kAtOnce
    for (int i = 0; i < C::kTile; i += 32 / kLanes) {
      const int64_t at = __shfl_sync(~0u, offset, i + sub);
      const bool live = at >= 0 && chunk * 16 < live_bytes;
      if (chunk < kChunks) {
        copy_async_16(tile + tile_offset<C>(i + sub, chunk), rows + (live ? at + chunk * 16 : 0), live ? 16 : 0);
      }
    }
  }

  const DecodeParams& params_;
  typename C::SharedMemory& shared_;
  PagedSteps<C, C::kTile, KeyOf> walk_;
  int stage_ = 0;
};

// Where the copying warps do all that.
template <class C>
class RowCopier<C, false> {
 public:
  __device__ RowCopier(const DecodeParams&, const DecodeItem&, typename C::SharedMemory&) {}
  __device__ void begin() {}
  __device__ void copy_next() {}
};

}  // namespace fovea::kernels::cuda
