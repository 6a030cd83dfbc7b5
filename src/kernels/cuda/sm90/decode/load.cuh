// SPDX-License-Identifier: Apache-2.0
// What the warps that copy and those that compute know about a CTA's work: its steps, its pages, its scales.
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

// Floats from a key's scales to the next's in a stage, and where a head's is.
__device__ inline int scale_pitch(const BatchParams& batch) { return min(batch.kv_heads, kScaleHeads); }
__device__ inline int place_of_scale(const BatchParams& batch, const DecodeItem& item, int key, int head) {
  return key * scale_pitch(batch) + (item.kv_head + head) % kScaleHeads;
}

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
  __device__ int read(const DecodeItem& item, int key) const { return __ldg(entry(item, key)); }
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

}  // namespace fovea::kernels::cuda
