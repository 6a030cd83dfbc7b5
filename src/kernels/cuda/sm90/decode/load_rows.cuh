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
  __device__ RowCopier(const DecodeParams& params, const DecodeItem& first, typename C::SharedMemory& shared)
      : params_(params), shared_(shared), table_(params.keys), item_(first), at_(shared.range_begin) {
    if (!kUsed) return;
    step_ = Steps<C>(item_).first;
    read_entry();
  }

  // Of the next step, whatever item it is of; one group of copies.
  __device__ void copy_next() {
    if (at_ < shared_.range_end) {
      const Steps<C> steps(item_);
      const int warp = threadIdx.x / 32;
      const int key = steps.key_of(step_, warp) + threadIdx.x % 32 % C::kTile;
      const bool live = key >= steps.begin && key < steps.end;
      const int head = item_.kv_head + warp % steps.heads;
      const KeyParams& keys = params_.keys;
      const bool paged = keys.page_table != nullptr;
      const int64_t page = paged ? entry_ : 0;
      const int64_t place = paged ? table_.place_of(key) : entry_ + key;
      if (steps.key_of(step_, warp) < steps.end) {
        auto& k = shared_.k[stage_];
        auto& v = shared_.v[stage_];
        copy_tile<C::kKPieces>(static_cast<const char*>(keys.k) + head * keys.k_head_stride * kBytes,
                  live ? (page * keys.k_page_stride + place * keys.k_token_stride) * kBytes : -1,
                  params_.head_dim * kBytes, k.tiles[warp][0][0]);
        copy_tile<C::kVPieces>(static_cast<const char*>(keys.v) + head * keys.v_head_stride * kBytes,
                  live ? (page * keys.v_page_stride + place * keys.v_token_stride) * kBytes : -1,
                  params_.head_dim_v * kBytes, v.tiles[warp][0][0]);
        if (has_token_scales<C>(params_) && threadIdx.x % 32 < C::kTile) {
          const int64_t slot = page * keys.page_size + place;
          const int64_t at =
              live ? slot * keys.scale_slot_stride + static_cast<int64_t>(head) * keys.scale_head_stride : 0;
          const int to = place_of_scale(params_.batch, item_, warp / steps.heads * C::kTile + threadIdx.x % 32,
                                        warp % steps.heads);
          copy_word_async(&k.scales[to], keys.k_scale + at, live ? 4 : 0);
          copy_word_async(&v.scales[to], keys.v_scale + at, live ? 4 : 0);
        }
      }
      step_ += steps.size();
      if (step_ >= steps.end && ++at_ < shared_.range_end) {
        item_ = params_.list.items[at_];
        step_ = Steps<C>(item_).first;
      }
      read_entry();
    }
    commit_copies();
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
  }

 private:
  static constexpr int kBytes = type_bytes(C::kKv);

  // The page of this lane's key, one step ahead of its use; of packed keys where the request's begin.
  __device__ void read_entry() {
    const int key = Steps<C>(item_).key_of(step_, threadIdx.x / 32) + threadIdx.x % 32 % C::kTile;
    if (!params_.keys.page_table) {
      entry_ = params_.keys.kv_indptr[item_.request];
    } else if (key < item_.key_end) {
      entry_ = table_.read(item_, key);
    }
  }

  // Lane l knows where row l begins, -1: nowhere.
  template <int kPieces>
  __device__ static void copy_tile(const char* rows, int64_t offset, int live_bytes, char* tile) {
    constexpr int kChunks = kPieces * (kPieceBytes / 16);
    constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;  // that copy a row
    const int chunk = threadIdx.x % kLanes;
    const int sub = threadIdx.x % 32 / kLanes;
    constexpr int kAtOnce = C::kRowTile == 8 ? 4 : 2;  // registers: 4 spilled with 16 rows and fp8
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
  const PageTable table_;
  DecodeItem item_;
  int at_;
  int step_;
  int entry_ = 0;
  int stage_ = 0;
};

}  // namespace fovea::kernels::cuda
