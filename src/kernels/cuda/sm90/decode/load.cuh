// SPDX-License-Identifier: Apache-2.0
// The work of a CTA, as copying and computing warps see it: its steps, pages and scales.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/sm90/decode/config.cuh"

namespace fovea::kernels::cuda {

// The item that a CTA works on. Its warps are distributed over the item's heads.
struct Tile {
  DecodeItem item;
  RequestView view;
  int group;  // q heads a kv head
  int rows;   // valid rows, at most the row tile

  __device__ int token_of(int row) const {
    const int packed = item.first_row + row;
    return packed < group ? 0 : packed / group;
  }
  // `head` counts the item's heads from 0.
  __device__ int q_head_of(int head, int row) const {
    const int packed = item.first_row + row;
    return (item.kv_head + head) * group + (packed < group ? packed : packed % group);
  }
};

// Returns the scale that all keys of a head share, or 1.
__device__ inline float shared_scale(const KeyParams& keys, const float* scale, int kv_head) {
  return scale && keys.scale_slot_stride == 0 ? scale[kv_head * keys.scale_head_stride] : 1.0f;
}

// The steps of an item. In each step every computing warp has one tile of kTile keys of one head.
// Tiles begin at multiples of kBoxKeys.
template <class C>
struct Steps {
  int heads, begin, end, first;  // `first` is that of the first step, at most kBoxKeys - 1 before
                                 // `begin`
  int shift;                     // log2 of heads

  __device__ explicit Steps(const DecodeItem& item)
      : heads(item.heads),
        begin(item.key_begin),
        end(item.key_end),
        first(begin / kBoxKeys * kBoxKeys),
        shift(31 - __clz(heads)) {}
  __device__ int size() const { return (C::kWarps * C::kTile) >> shift; }
  // Return the head of a warp, and the first key of its tile in the step at `step`.
  __device__ int head_of(int warp) const { return warp & (heads - 1); }
  __device__ int key_of(int step, int warp) const { return step + (warp >> shift) * C::kTile; }
};

// Returns the stages of the rings that a range uses. Parts of a cluster that nearly fit the rings
// use all stages; if computing warps copy the rows, only when other CTAs are idle. All CTAs of a
// cluster use the same number, which follows from the longest part.
template <class C>
__device__ int stage_count(const DecodeParams& params, const DecodeRange& range) {
  const int steps = (range.cluster_units * kBoxKeys + C::kStepKeys - 1) / C::kStepKeys;
  const bool all =
      steps > C::kUsualStages && steps <= 2 * C::kStages && (params.boxes || range.leaves_idle);
  return all ? C::kStages : C::kUsualStages;
}

// Return the number of floats between the scales of adjacent keys in a stage, and the place of a
// head's scale.
__device__ inline int scale_pitch(const BatchParams& batch) {
  return min(batch.kv_heads, kScaleHeads);
}
__device__ inline int place_of_scale(const BatchParams& batch, const DecodeItem& item, int key,
                                     int head) {
  return key * scale_pitch(batch) + (item.kv_head + head) % kScaleHeads;
}

// The pages of a batch's keys.
class PageTable {
 public:
  __device__ explicit PageTable(const KeyParams& keys) : keys_(keys) {
    const int size = keys.page_size;
    shift_ = (size & (size - 1)) == 0 ? 31 - __clz(size) : -1;
  }
  __device__ int page_of(int key) const {
    return shift_ >= 0 ? key >> shift_ : key / keys_.page_size;
  }
  __device__ int place_of(int key) const { return key - page_of(key) * keys_.page_size; }
  // Returns the id of the page of a key. Before the wait (early) it reads the L2, where the table
  // is complete; after the wait the L1 serves repeated reads faster.
  __device__ int read(const DecodeItem& item, int key, bool early) const {
    const int32_t* at = keys_.page_table + item.request * keys_.page_table_stride + page_of(key);
    return early ? __ldcg(at) : __ldg(at);
  }

 private:
  const KeyParams& keys_;
  int shift_;
};

// Reads a value of the plan from the L2, where it is complete before the wait.
template <typename T>
__device__ T read_planned(const T* at) {
  static_assert(sizeof(T) % sizeof(int4) == 0);
  T value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(int4)); ++i) {
    reinterpret_cast<int4*>(&value)[i] = __ldcg(reinterpret_cast<const int4*>(at) + i);
  }
  return value;
}

// Walks over the steps of a range in order and finds the kPerStep page ids that a warp needs in
// each step: those of the keys that key_of(steps, step, place) returns. A load that follows copies
// takes as long as the copies do, so items are read two ahead, and ids one window ahead. A window
// is as many steps as 32 lanes have ids for. All lanes call every method together.
template <class C, int kPerStep, typename KeyOf>
class PagedSteps {
 public:
  // May run before the wait.
  __device__ PagedSteps(const DecodeParams& params, const DecodeItem& first, int begin,
                        const int& end, KeyOf key_of)
      : params_(params),
        table_(params.keys),
        key_of_(key_of),
        end_(end),
        at_(begin),
        item_(first),
        new_keys_(first.kv_len - first.q_len),
        step_(Steps<C>(first).first) {
    next_ = read_item(at_ + 1);
    after_ = read_item(at_ + 2);
    then_ = read_window(item_, step_, true);
    begin_window(true);
  }
  __device__ bool done() const { return at_ >= end_; }
  // An item without keys has one step, which the caller skips.
  __device__ bool empty() const { return step_ >= item_.key_end; }
  __device__ const DecodeItem& item() const { return item_; }
  __device__ int step() const { return step_; }
  // Returns the first of the item's keys that this pass stores.
  __device__ int new_keys() const { return new_keys_; }
  __device__ const PageTable& table() const { return table_; }
  // Returns the page id of a place of the step; each lane may pass its own place.
  __device__ int page(int place) const {
    return __shfl_sync(~0u, now_, in_window_ * kPerStep + place);
  }
  __device__ void advance() {
    step_ += Steps<C>(item_).size();
    bool fresh = ++in_window_ == kSteps;
    if (step_ >= item_.key_end) {
      if (++at_ >= end_) return;
      item_ = item_of(next_);
      new_keys_ = __shfl_sync(~0u, next_, kWord.kv_len) - __shfl_sync(~0u, next_, kWord.q_len);
      next_ = after_;
      after_ = read_item(at_ + 2);
      step_ = Steps<C>(item_).first;
      fresh = true;
    }
    if (fresh) begin_window(false);
  }

 private:
  static constexpr int kSteps = 32 / kPerStep;  // steps of a window
  static_assert(kSteps * kPerStep == 32);
  static constexpr int kItemWords = sizeof(DecodeItem) / sizeof(int);
  static constexpr DecodeItem kWord = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};

  __device__ void begin_window(bool early) {
    in_window_ = 0;
    now_ = then_;
    const int behind = step_ + kSteps * Steps<C>(item_).size();
    const bool same = behind < item_.key_end;
    if (!same && at_ + 1 >= end_) return;
    const DecodeItem item = same ? item_ : item_of(next_);
    then_ = read_window(item, same ? behind : Steps<C>(item).first, early);
  }
  // Returns this lane's id of the window that begins at `first`; for packed keys, the index of the
  // request's first key.
  __device__ int read_window(const DecodeItem& item, int first, bool early) const {
    const int lane = threadIdx.x % 32;
    const Steps<C> steps(item);
    const int key = key_of_(steps, first + lane / kPerStep * steps.size(), lane % kPerStep);
    if (!params_.keys.page_table) return __ldcg(params_.keys.kv_indptr + item.request);
    return key < steps.end ? table_.read(item, key, early) : 0;
  }
  // Reads an item into one register: each lane has one word of it.
  __device__ int read_item(int at) const {
    const int lane = threadIdx.x % 32;
    return at < end_ && lane < kItemWords
               ? __ldcg(reinterpret_cast<const int*>(params_.list.items + at) + lane)
               : 0;
  }
  // Returns the fields of an item that this class needs.
  __device__ static DecodeItem item_of(int words) {
    DecodeItem item;
    item.request = __shfl_sync(~0u, words, kWord.request);
    item.kv_head = __shfl_sync(~0u, words, kWord.kv_head);
    item.key_begin = __shfl_sync(~0u, words, kWord.key_begin);
    item.key_end = __shfl_sync(~0u, words, kWord.key_end);
    item.heads = __shfl_sync(~0u, words, kWord.heads);
    return item;
  }

  const DecodeParams& params_;
  const PageTable table_;
  const KeyOf key_of_;
  const int& end_;
  int at_;
  DecodeItem item_;
  int next_, after_;  // the two items that follow
  int new_keys_;
  int step_;
  int in_window_;   // steps of the window before this one
  int now_, then_;  // this lane's ids of this window and of the next one
};

template <class C>
__device__ bool has_token_scales(const DecodeParams& params) {
  return C::kFp8 && params.keys.k_scale && params.keys.scale_slot_stride != 0;
}

}  // namespace fovea::kernels::cuda
