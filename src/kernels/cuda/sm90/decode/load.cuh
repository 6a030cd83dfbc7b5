// SPDX-License-Identifier: Apache-2.0
// Rows of K and V into shared memory. Where pages hold whole boxes of 16 keys two
// warps of their own copy them by the bulk copy engine, one K and one V.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
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

// Asking L2 for 128 bytes at once made large batches 2.5 % faster, for 256 bytes 6 % slower (H200,
// 2026-11-21).
__device__ inline void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}
__device__ inline void copy_async_4(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes));
}

// load_box with a policy of createpolicy for the L2.
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

// The steps of an item: in each, every consumer warp has one tile of kTile keys of one of its heads. Tiles
// begin at multiples of kBoxKeys.
template <class C>
struct Steps {
  int heads, begin, end, first;  // `first`: of the first step, at most kBoxKeys - 1 before `begin`

  __device__ explicit Steps(const DecodeItem& item)
      : heads(item.heads), begin(item.key_begin), end(item.key_end), first(begin / kBoxKeys * kBoxKeys) {}
  __device__ int size() const { return C::kWarps / heads * C::kTile; }
  // First key of a warp's tile in the step at `step`.
  __device__ int key_of(int step, int warp) const { return step + warp / heads * C::kTile; }
};

// Pages of keys.
class PageTable {
 public:
  __device__ explicit PageTable(const KeyParams& keys) : keys_(keys) {
    const int size = keys.page_size;
    shift_ = (size & (size - 1)) == 0 ? 31 - __clz(size) : -1;
  }
  __device__ int page_of(int key) const { return shift_ >= 0 ? key >> shift_ : key / keys_.page_size; }
  __device__ int place_of(int key) const { return key - page_of(key) * keys_.page_size; }
  // The id of the page that holds a key.
  __device__ int read(const DecodeItem& item, int key) const {
    return __ldg(entry(item, key));
  }
  // The same from the L2, which has a settled table before the wait. Behind copies that takes as long as they do:
  // every entry read so cost 5 % (128 x 4k on an H200, 2026-11-22).
  __device__ int read_early(const DecodeItem& item, int key) const { return __ldcg(entry(item, key)); }

 private:
  __device__ const int32_t* entry(const DecodeItem& item, int key) const {
    return keys_.page_table + item.request * keys_.page_table_stride + page_of(key);
  }

  const KeyParams& keys_;
  int shift_;
};

// Launched with overlap: but for a settled list and its page table nothing of earlier launches may be
// looked at before this.
__device__ inline void await_inputs() {
  wait_for_previous_kernel();
  allow_next_kernel();
}

template <class C>
__device__ bool has_token_scales(const DecodeParams& params) {
  return C::kFp8 && params.keys.k_scale && params.keys.scale_slot_stride != 0;
}

// One side of the keys, K or V, as the warp that copies it sees it.
struct Side {
  const TensorMap* map;
  const float* scale;
  int pieces;
  char* stages;
  int stage_bytes, scale_offset;
  TransactionBarrier* full;
  TransactionBarrier* empty;
};

template <class C>
__device__ Side side_of(const DecodeParams& params, typename C::SharedMemory& shared, bool is_k) {
  if (is_k) {
    return {&params.k_map, params.keys.k_scale, C::kKPieces, reinterpret_cast<char*>(shared.k),
            sizeof(shared.k[0]), sizeof(shared.k[0].tiles), shared.k_full, shared.k_empty};
  }
  return {&params.v_map, params.keys.v_scale, C::kVPieces, reinterpret_cast<char*>(shared.v),
          sizeof(shared.v[0]), sizeof(shared.v[0].tiles), shared.v_full, shared.v_empty};
}

// A warp that copies boxes. It walks through the work list by itself, as far ahead of the computation as
// there are free stages, across items. One piece of code for K and V: the first pass through code costs
// microseconds.
template <class C>
class BoxCopier {
 public:
  __device__ BoxCopier(const DecodeParams& params, const Side& side)
      : params_(params), side_(side), table_(params.keys), lane_(threadIdx.x % 32) {
    box_ = lane_ / side.pieces;
    piece_ = lane_ - box_ * side.pieces;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }

  __device__ void run(const DecodeRange& range) {
    if (lane_ == 0) prefetch_tensor_map(*side_.map);
    DecodeItem item = range.first;
    const Steps<C> first(item);
    const int first_key = box_key(first, first.first);
    int entry = first_key < first.end ? table_.read_early(item, first_key) : 0;
    await_inputs();
#pragma unroll 1
    for (int i = range.begin; i < range.end; ++i) {
      if (i > range.begin) item = params_.list.items[i];
      const Steps<C> steps(item);
      if (i > range.begin) entry = entry_of(item, steps, steps.first);
#pragma unroll 1
      for (int step = steps.first; step < steps.end; step += steps.size()) {
        side_.empty[stage_].wait(phase_ ^ 1);
        copy(item, steps, step, entry);
        // One step ahead of its use.
        entry = entry_of(item, steps, step + steps.size());
        if (++stage_ == C::kStages) {
          stage_ = 0;
          phase_ ^= 1;
        }
      }
    }
    wait_copies<0>();
  }

 private:
  static constexpr int kTileBoxes = C::kTile / kBoxKeys;  // of a piece
  static_assert(C::kWarps * kTileBoxes * C::kKPieces <= 32 && C::kKPieces >= C::kVPieces);

  __device__ char* stage() const { return side_.stages + stage_ * side_.stage_bytes; }

  // A lane's box: kBoxKeys of the keys of a warp's tile, 128 bytes of each.
  __device__ int box_key(const Steps<C>& steps, int step) const {
    if (box_ >= C::kWarps * kTileBoxes) return steps.end;
    return steps.key_of(step, box_ / kTileBoxes) + box_ % kTileBoxes * kBoxKeys;
  }
  __device__ int entry_of(const DecodeItem& item, const Steps<C>& steps, int step) const {
    const int key = box_key(steps, step);
    return key < steps.end ? table_.read(item, key) : 0;
  }

  __device__ void copy(const DecodeItem& item, const Steps<C>& steps, int step, int entry) {
    const int key = box_key(steps, step);
    const int warp = box_ / kTileBoxes;
    const bool live = key < steps.end;
    const int boxes = __popc(__ballot_sync(~0u, live));
    if (lane_ == 0) side_.full[stage_].arrive_expecting(boxes * kBoxKeys * kPieceBytes);
    __syncwarp();
    if (live) {
      char* to = stage() + ((warp * side_.pieces + piece_) * C::kTile + box_ % kTileBoxes * kBoxKeys) * kPieceBytes;
      load_box(to, *side_.map, side_.full[stage_], policy_, piece_ * (kPieceBytes / 2),
               item.kv_head + warp % steps.heads, table_.place_of(key), entry);
    }
    if (has_token_scales<C>(params_)) {
      copy_scales(item, steps, step, entry);
      side_.full[stage_].arrive_after_copies();
    }
  }

  // A row's page is that of its box; read row by row the pages would be eight loads in turn.
  __device__ void copy_scales(const DecodeItem& item, const Steps<C>& steps, int step, int entry) {
    const KeyParams& keys = params_.keys;
#pragma unroll
    for (int i = 0; i < C::kWarps * C::kTile / 32; ++i) {
      const int row = i * 32 + lane_;
      const int warp = row / C::kTile;
      const int64_t page = __shfl_sync(~0u, entry, row / kBoxKeys * side_.pieces);
      const int key = steps.key_of(step, warp) + row % C::kTile;
      const bool live = key >= steps.begin && key < steps.end;
      const int64_t slot = page * keys.page_size + table_.place_of(key);
      const int64_t at = live ? slot * keys.scale_slot_stride +
                                    static_cast<int64_t>(item.kv_head + warp % steps.heads) * keys.scale_head_stride
                              : 0;
      copy_async_4(stage() + side_.scale_offset + row * 4, side_.scale + at, live ? 4 : 0);
    }
  }

  const DecodeParams& params_;
  const Side side_;
  const PageTable table_;
  const int lane_;
  int box_, piece_;
  uint64_t policy_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// Where boxes do not fit, every warp that computes copies the rows of its own tiles, which may lie
// anywhere, so many steps ahead as there are stages. (Two warps for all of them reached half the bandwidth:
// no more than 63 such copies of a warp are ever on their way.) What no key of the item owns becomes zero.
template <class C, bool kUsed>
class RowCopier {
 public:
  __device__ RowCopier(const DecodeParams& params, const DecodeRange& range, typename C::SharedMemory& shared)
      : params_(params), shared_(shared), table_(params.keys), item_(range.first), at_(range.begin), end_(range.end) {
    if (!kUsed) return;
    step_ = Steps<C>(item_).first;
    read_entry();
  }

  // Of the next step, whatever item it is of; one group of copies.
  __device__ void copy_next() {
    if (at_ < end_) {
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
          copy_async_4(&k.scales[warp][threadIdx.x % 32], keys.k_scale + at, live ? 4 : 0);
          copy_async_4(&v.scales[warp][threadIdx.x % 32], keys.v_scale + at, live ? 4 : 0);
        }
      }
      step_ += steps.size();
      if (step_ >= steps.end && ++at_ < end_) {
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
  const int end_;
  int step_;
  int entry_ = 0;
  int stage_ = 0;
};

}  // namespace fovea::kernels::cuda
