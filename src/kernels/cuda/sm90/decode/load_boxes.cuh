// SPDX-License-Identifier: Apache-2.0
// The copies of K and V if pages hold whole boxes of 16 keys: dedicated warps use the bulk copy
// engine.
#pragma once

#include "kernels/cuda/sm90/decode/load.cuh"

namespace fovea::kernels::cuda {

// Returns true if scales are copied one by one. With few kv heads, the scales of 16 keys and all
// heads are one copy.
template <class C>
__device__ bool copies_scales_singly(const DecodeParams& params) {
  const KeyParams& keys = params.keys;
  const bool aligned =
      (reinterpret_cast<uint64_t>(keys.k_scale) | reinterpret_cast<uint64_t>(keys.v_scale)) % 16 ==
      0;
  return has_token_scales<C>(params) && (params.batch.kv_heads > kScaleHeads || !aligned);
}

// Returns true if keys written before this pass are copied before the wait. Only ranges of one
// short tile or part do this: copies of longer ranges would slow down the end of the preceding
// kernel (limits chosen on H200, 2026-11-23).
template <class C>
__device__ bool reads_ahead(const DecodeParams& params, const DecodeRange& range) {
  if (copies_scales_singly<C>(params)) return false;
  const Steps<C> steps(range.first);
  const int most = range.first.partial < 0   ? (C::kFp8 ? 32 : 16)
                   : range.cluster_units > 0 ? 8
                                             : C::kUsualStages + 1;
  return params.keys_complete && range.end - range.begin == 1 &&
         steps.end - steps.first <= most * steps.size();
}

// K or V, as the warps that copy its boxes see it.
struct Side {
  const TensorMap* map;
  const float* scale;
  int pieces;
  int sharers;  // warps that share the copies
  char* stages;
  int stage_bytes, scale_offset;
  TransactionBarrier* full;
  TransactionBarrier* empty;
};

template <class C>
__device__ Side side_of(const DecodeParams& params, typename C::SharedMemory& shared, bool is_k) {
  if (is_k) {
    return {&params.k_map,
            params.keys.k_scale,
            C::kKPieces,
            C::kKSharers,
            reinterpret_cast<char*>(shared.k),
            sizeof(shared.k[0]),
            sizeof(shared.k[0].tiles),
            shared.k_full,
            shared.k_empty};
  }
  return {&params.v_map,
          params.keys.v_scale,
          C::kVPieces,
          C::kVSharers,
          reinterpret_cast<char*>(shared.v),
          sizeof(shared.v[0]),
          sizeof(shared.v[0].tiles),
          shared.v_full,
          shared.v_empty};
}

// A warp that copies boxes. It walks through the work list, across items, and runs ahead of the
// computation while there are free stages. K and V share the code, because cold instructions cost
// microseconds.
template <class C>
class BoxCopier {
 public:
  // `rank` counts the warps that share the copies.
  __device__ BoxCopier(const DecodeParams& params, const Side& side, int rank)
      : params_(params), side_(side), lane_(threadIdx.x % 32), rank_(rank) {
    const int number = lane_ * side.sharers + rank;
    box_ = number / side.pieces;
    piece_ = number - box_ * side.pieces;
  }

  __device__ void run(const DecodeItem& first, int begin, const int& end, int stages, bool ahead) {
    if (lane_ == 0) prefetch_tensor_map(*side_.map);
    const auto key_of = [](const Steps<C>& steps, int step, int box) {
      return box_key(steps, step, box);
    };
    PagedSteps<C, kBoxes, decltype(key_of)> walk(params_, first, begin, end, key_of);
    if (params_.plan_complete) {
      // Prefetches the first boxes to the L2, which later writes to them reach too. The boxes of
      // all stages would make large batches slower.
      const Box box = find_box(walk);
      if (box.live && !(ahead && is_earlier(walk, box))) {
        prefetch_box(*side_.map, kEvictFirst, piece_ * (kPieceBytes / 2), box.head, box.place,
                     box.page);
      }
    }
    if (!ahead) wait();
    // For fp8, the steps whose keys and scales are all older than the pass. Asking in each step,
    // for each of its boxes, would spill registers.
    [[maybe_unused]] int older_steps = 0;
    if constexpr (C::kFp8) {
      const Steps<C> steps(first);
      older_steps = max(walk.new_keys() - steps.first, 0) >> (31 - __clz(steps.size()));
    }
#pragma unroll 1
    for (; !walk.done(); walk.advance()) {
      if (walk.empty()) continue;
      if (C::kFp8 && ahead && older_steps-- == 0) wait();
      copy(walk);
      if (++stage_ == stages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
    wait_copies<0>();
  }

 private:
  static constexpr int kTileBoxes = C::kTile / kBoxKeys;  // boxes of a tile, for each piece
  static constexpr int kBoxes = C::kWarps * kTileBoxes;   // boxes of a step, for each piece
  static_assert(kBoxes * C::kKPieces <= 32 && C::kKPieces >= C::kVPieces);

  __device__ char* stage() const { return side_.stages + stage_ * side_.stage_bytes; }
  __device__ float* scales() const {
    return reinterpret_cast<float*>(stage() + side_.scale_offset);
  }

  __device__ void wait() {
    wait_for_previous_kernel();
    waited_ = true;
  }

  // Returns the first key of a box of a step.
  __device__ static int box_key(const Steps<C>& steps, int step, int box) {
    return steps.key_of(step, box / kTileBoxes) + box % kTileBoxes * kBoxKeys;
  }

  // The place of this lane's box: kBoxKeys keys of a warp's tile, 128 bytes of each.
  struct Box {
    int key;
    bool live;
    int head, place, page;
  };
  // Returns true if all keys of a box are older than the pass; other boxes come after the wait.
  template <typename Walk>
  __device__ static bool is_earlier(const Walk& walk, const Box& box) {
    return box.key + kBoxKeys <= walk.new_keys();
  }
  template <typename Walk>
  __device__ Box find_box(const Walk& walk) const {
    const Steps<C> steps(walk.item());
    const int key = box_key(steps, walk.step(), box_);
    return {key, box_ < kBoxes && key < steps.end,
            walk.item().kv_head + steps.head_of(box_ / kTileBoxes), walk.table().place_of(key),
            walk.page(box_ % kBoxes)};
  }

  template <typename Walk>
  __device__ void copy(const Walk& walk) {
    const Box box = find_box(walk);
    const bool singly = copies_scales_singly<C>(params_);
    // The copy of the first head's first piece includes the scales of the box's keys.
    const bool brings = has_token_scales<C>(params_) && !singly && box.live && piece_ == 0 &&
                        box.head == walk.item().kv_head;
    const int scale_bytes = kBoxKeys * params_.batch.kv_heads * static_cast<int>(sizeof(float));
    TransactionBarrier& full = side_.full[stage_];
    int bytes = __popc(__ballot_sync(~0u, box.live)) * kBoxKeys * kPieceBytes;
    if constexpr (C::kFp8) bytes += __popc(__ballot_sync(~0u, brings)) * scale_bytes;
    const int row =
        (box_ / kTileBoxes * side_.pieces + piece_) * C::kTile + box_ % kTileBoxes * kBoxKeys;
    char* to = stage() + row * kPieceBytes;
    side_.empty[stage_].wait(phase_ ^ 1);
    if (lane_ == 0) full.arrive_expecting(bytes);
    __syncwarp();
    if constexpr (C::kFp8) {
      if (box.live) load(box, to);
      if (brings) {
        const int64_t slot = static_cast<int64_t>(box.page) * params_.keys.page_size + box.place;
        load_bytes(scales() + (box.key - walk.step()) * params_.batch.kv_heads,
                   side_.scale + slot * params_.batch.kv_heads, scale_bytes, full, kEvictFirst);
      }
      if (singly && rank_ == 0) {
        copy_scales_singly(walk);
        full.arrive_after_copies();
      }
    } else {
      const bool late = !waited_ && !is_earlier(walk, box);
      if (box.live && !late) load(box, to);
      if (__any_sync(~0u, box.live && late)) {
        wait();
        if (box.live && late) load(box, to);
      }
    }
  }
  __device__ void load(const Box& box, char* to) const {
    load_box(to, *side_.map, side_.full[stage_], kEvictFirst, piece_ * (kPieceBytes / 2), box.head,
             box.place, box.page);
  }

  // Copies the scales of the item's heads, with zeros for keys outside the item. A key has the page
  // of its box.
  template <typename Walk>
  __device__ void copy_scales_singly(const Walk& walk) {
    const DecodeItem& item = walk.item();
    const Steps<C> steps(item);
    const int step = walk.step();
    const KeyParams& keys = params_.keys;
#pragma unroll
    for (int i = 0; i < C::kStepKeys / 32; ++i) {
      const int row = i * 32 + lane_;
      const int warp = row / C::kTile;
      const int64_t page = walk.page(row / kBoxKeys);
      const int key = steps.key_of(step, warp) + row % C::kTile;
      const int head = steps.head_of(warp);
      const bool live = key >= steps.begin && key < steps.end;
      const int64_t slot = page * keys.page_size + walk.table().place_of(key);
      copy_word_async(
          scales() + place_of_scale(params_.batch, item, key - step, head),
          side_.scale + (live ? slot * keys.scale_slot_stride + item.kv_head + head : 0),
          live ? 4 : 0);
    }
  }

  const DecodeParams& params_;
  const Side side_;
  const int lane_, rank_;
  int box_, piece_;
  int stage_ = 0;
  uint32_t phase_ = 0;
  bool waited_ = false;
};

}  // namespace fovea::kernels::cuda
