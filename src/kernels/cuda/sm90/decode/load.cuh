// SPDX-License-Identifier: Apache-2.0
// What the warps that copy and those that compute know about a CTA's work: its steps, its pages,
// its scales.
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

// The steps of an item: in each, every consumer warp has one tile of kTile keys of one of its
// heads. Tiles begin at multiples of kBoxKeys.
template <class C>
struct Steps {
  int heads, begin, end, first;  // `first`: of the first step, at most kBoxKeys - 1 before `begin`
  int shift;                     // heads are a power of two

  __device__ explicit Steps(const DecodeItem& item)
      : heads(item.heads),
        begin(item.key_begin),
        end(item.key_end),
        first(begin / kBoxKeys * kBoxKeys),
        shift(31 - __clz(heads)) {}
  __device__ int size() const { return (C::kWarps * C::kTile) >> shift; }
  // The item's head that a warp has, and the first key of its tile in the step at `step`.
  __device__ int head_of(int warp) const { return warp & (heads - 1); }
  __device__ int key_of(int step, int warp) const { return step + (warp >> shift) * C::kTile; }
};

// Stages of the rings that a range uses: all for parts of a cluster that nearly fit them, where
// rows are copied by the warps that compute only if other CTAs are idle (pages of 1: 8 x 1k 13.0
// instead of 12.3 us, 1 x 4k 9.4 instead of 10.5, H200, 2026-11-23). The same for all of a cluster:
// by its longest part.
template <class C>
__device__ int stage_count(const DecodeParams& params, const DecodeRange& range) {
  const int steps = (range.cluster_units * kBoxKeys + C::kStepKeys - 1) / C::kStepKeys;
  const bool all =
      steps > C::kUsualStages && steps <= 2 * C::kStages && (params.boxes || range.leaves_idle);
  return all ? C::kStages : C::kUsualStages;
}

// Floats from a key's scales to the next's in a stage, and where a head's is.
__device__ inline int scale_pitch(const BatchParams& batch) {
  return min(batch.kv_heads, kScaleHeads);
}
__device__ inline int place_of_scale(const BatchParams& batch, const DecodeItem& item, int key,
                                     int head) {
  return key * scale_pitch(batch) + (item.kv_head + head) % kScaleHeads;
}

// Pages of keys.
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
  // The id of the page that holds a key. Before the wait from the L2, which has a settled table;
  // behind it so read every id cost 1 % (128 x 4k and pages of 1, H200, 2026-11-22).
  __device__ int read(const DecodeItem& item, int key, bool early) const {
    const int32_t* at = keys_.page_table + item.request * keys_.page_table_stride + page_of(key);
    return early ? __ldcg(at) : __ldg(at);
  }

 private:
  const KeyParams& keys_;
  int shift_;
};

// From the L2.
template <typename T>
__device__ T read_settled(const T* at) {
  static_assert(sizeof(T) % sizeof(int4) == 0);
  T value;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(int4)); ++i) {
    reinterpret_cast<int4*>(&value)[i] = __ldcg(reinterpret_cast<const int4*>(at) + i);
  }
  return value;
}

// The steps of a range in order, and the page ids that a warp needs in each: kPerStep of them, of
// the keys that key_of(steps, step, place) names. Behind copies a load takes as long as they do, so
// items are read two ahead and ids a window ahead, which is as many steps as 32 lanes have ids for
// (5 % at 8 x 16k with pages of 16, H200, 2026-11-22). All lanes call everything together.
template <class C, int kPerStep, typename KeyOf>
class PagedSteps {
 public:
  // May come before the wait.
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
  // An item without keys has one step, which is to be skipped.
  __device__ bool empty() const { return step_ >= item_.key_end; }
  __device__ const DecodeItem& item() const { return item_; }
  __device__ int step() const { return step_; }
  // The first of the item's keys that the pass itself stores.
  __device__ int new_keys() const { return new_keys_; }
  __device__ const PageTable& table() const { return table_; }
  // The id for a place of the step; each lane may ask for another.
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
  static constexpr int kSteps = 32 / kPerStep;  // of a window
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
  // The ids of the window that begins at `first`; of packed keys where the request's begin.
  __device__ int read_window(const DecodeItem& item, int first, bool early) const {
    const int lane = threadIdx.x % 32;
    const Steps<C> steps(item);
    const int key = key_of_(steps, first + lane / kPerStep * steps.size(), lane % kPerStep);
    if (!params_.keys.page_table) return __ldcg(params_.keys.kv_indptr + item.request);
    return key < steps.end ? table_.read(item, key, early) : 0;
  }
  // An item in one register: each lane has a word.
  __device__ int read_item(int at) const {
    const int lane = threadIdx.x % 32;
    return at < end_ && lane < kItemWords
               ? __ldcg(reinterpret_cast<const int*>(params_.list.items + at) + lane)
               : 0;
  }
  // What of it is needed here.
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
  int next_, after_;  // the items behind it
  int new_keys_;
  int step_;
  int in_window_;   // steps of the window before this one
  int now_, then_;  // this lane's ids of this window and of the next
};

template <class C>
__device__ bool has_token_scales(const DecodeParams& params) {
  return C::kFp8 && params.keys.k_scale && params.keys.scale_slot_stride != 0;
}

}  // namespace fovea::kernels::cuda
