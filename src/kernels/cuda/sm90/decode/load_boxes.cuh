// SPDX-License-Identifier: Apache-2.0
// K and V where pages hold whole boxes of 16 keys: two warps of their own copy them by the bulk copy engine.
#pragma once

#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

// load_box with a policy of createpolicy for the L2.
__device__ inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier,
                                uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

// Bytes that lie side by side, a multiple of 16.
__device__ inline void load_bytes(void* shared, const void* global, int bytes, TransactionBarrier& barrier,
                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

// Scales of few heads come 16 keys at a time, of all heads; else one by one.
template <class C>
__device__ bool copies_scales_singly(const DecodeParams& params) {
  const KeyParams& keys = params.keys;
  const bool aligned = (reinterpret_cast<uint64_t>(keys.k_scale) | reinterpret_cast<uint64_t>(keys.v_scale)) % 16 == 0;
  return has_token_scales<C>(params) && (params.batch.kv_heads > kScaleHeads || !aligned);
}

// One side of the keys, K or V, as the warp that copies its boxes sees it.
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

  __device__ void run(DecodeItem item, int begin, const int& end) {
    if (lane_ == 0) prefetch_tensor_map(*side_.map);
    const Steps<C> first(item);
    const int first_key = box_key(first, first.first);
    int entry = first_key < first.end ? table_.read_early(item, first_key) : 0;
    await_inputs();
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      // What is read here, an item or a step ahead of its use, takes as long as the copies before it do.
      DecodeItem next = item;
      if (i + 1 < end) next = params_.list.items[i + 1];
      const Steps<C> steps(item);
      if (steps.first >= steps.end) entry = first_entry(next);
#pragma unroll 1
      for (int step = steps.first; step < steps.end; step += steps.size()) {
        side_.empty[stage_].wait(phase_ ^ 1);
        copy(item, steps, step, entry);
        const bool last = step + steps.size() >= steps.end;
        entry = last ? first_entry(next) : entry_of(item, steps, step + steps.size());
        if (++stage_ == C::kStages) {
          stage_ = 0;
          phase_ ^= 1;
        }
      }
      item = next;
    }
    wait_copies<0>();
  }

 private:
  static constexpr int kTileBoxes = C::kTile / kBoxKeys;  // of a piece
  static_assert(C::kWarps * kTileBoxes * C::kKPieces <= 32 && C::kKPieces >= C::kVPieces);

  __device__ char* stage() const { return side_.stages + stage_ * side_.stage_bytes; }
  __device__ float* scales() const { return reinterpret_cast<float*>(stage() + side_.scale_offset); }

  // A lane's box: kBoxKeys of the keys of a warp's tile, 128 bytes of each.
  __device__ int box_key(const Steps<C>& steps, int step) const {
    if (box_ >= C::kWarps * kTileBoxes) return steps.end;
    return steps.key_of(step, box_ / kTileBoxes) + box_ % kTileBoxes * kBoxKeys;
  }
  __device__ int entry_of(const DecodeItem& item, const Steps<C>& steps, int step) const {
    const int key = box_key(steps, step);
    return key < steps.end ? table_.read(item, key) : 0;
  }
  __device__ int first_entry(const DecodeItem& item) const {
    const Steps<C> steps(item);
    return entry_of(item, steps, steps.first);
  }

  __device__ void copy(const DecodeItem& item, const Steps<C>& steps, int step, int entry) {
    const int key = box_key(steps, step);
    const int warp = box_ / kTileBoxes;
    const bool live = key < steps.end;
    const bool singly = copies_scales_singly<C>(params_);
    // The first head's first piece brings along the scales of the box's keys.
    const bool brings = has_token_scales<C>(params_) && !singly && live && piece_ == 0 && warp % steps.heads == 0;
    const int scale_bytes = kBoxKeys * params_.batch.kv_heads * static_cast<int>(sizeof(float));
    TransactionBarrier& full = side_.full[stage_];
    int bytes = __popc(__ballot_sync(~0u, live)) * kBoxKeys * kPieceBytes;
    if constexpr (C::kFp8) bytes += __popc(__ballot_sync(~0u, brings)) * scale_bytes;
    if (lane_ == 0) full.arrive_expecting(bytes);
    __syncwarp();
    if (live) {
      char* to = stage() + ((warp * side_.pieces + piece_) * C::kTile + box_ % kTileBoxes * kBoxKeys) * kPieceBytes;
      load_box(to, *side_.map, full, policy_, piece_ * (kPieceBytes / 2), item.kv_head + warp % steps.heads,
               table_.place_of(key), entry);
    }
    if constexpr (C::kFp8) {
      if (brings) {
        const int64_t slot = static_cast<int64_t>(entry) * params_.keys.page_size + table_.place_of(key);
        load_bytes(scales() + (key - step) * params_.batch.kv_heads, side_.scale + slot * params_.batch.kv_heads,
                   scale_bytes, full, policy_);
      }
      if (singly) {
        copy_scales_singly(item, steps, step, entry);
        full.arrive_after_copies();
      }
    }
  }

  // Those of the item's heads; zeros for keys that are not the item's. A key's page is that of its box: read key by
  // key the pages would be loads in turn.
  __device__ void copy_scales_singly(const DecodeItem& item, const Steps<C>& steps, int step, int entry) {
    const KeyParams& keys = params_.keys;
#pragma unroll
    for (int i = 0; i < C::kStepKeys / 32; ++i) {
      const int row = i * 32 + lane_;
      const int warp = row / C::kTile;
      const int64_t page = __shfl_sync(~0u, entry, row / kBoxKeys * side_.pieces);
      const int key = steps.key_of(step, warp) + row % C::kTile;
      const int head = warp % steps.heads;
      const bool live = key >= steps.begin && key < steps.end;
      const int64_t slot = page * keys.page_size + table_.place_of(key);
      copy_word_async(scales() + place_of_scale(params_.batch, item, key - step, head),
                      side_.scale + (live ? slot * keys.scale_slot_stride + item.kv_head + head : 0), live ? 4 : 0);
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

}  // namespace fovea::kernels::cuda
