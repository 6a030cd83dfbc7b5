// SPDX-License-Identifier: Apache-2.0
// The warps that take work and copy keys and values.
#pragma once

#include "kernels/cuda/sm90/common/work_list.cuh"
#include "kernels/cuda/sm90/few_rows/config.cuh"

namespace fovea::kernels::cuda {

// Takes row tiles from the list before the copies need them. One warp runs it.
template <class Config>
__device__ void take_row_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  PrefillOrder* order = params.order;
  Ring<kTileSlots> slots;
  int n = blockIdx.x;
  for (bool first = true;; first = false) {
    shared.tile_empty[slots.stage].wait(slots.phase ^ 1);
    TileCut cut;
    const WorkTile work = work_at<Config>(params, *order, n, cut);
    if (lane == 0) {
      shared.tiles[slots.stage].work = work;
      shared.tiles[slots.stage].cut = cut;
      shared.tile_full[slots.stage].arrive();
    }
    slots.advance();
    if (first) wait_for_previous_kernel();  // it uses the same counters
    if (work.request < 0) break;
    n = __shfl_sync(~0u, lane == 0 ? atomicAdd(&order->taken, 1) : 0, 0) +
        static_cast<int>(gridDim.x);
  }
  // The last block that runs out of work resets the counters.
  if (lane == 0 && atomicAdd(&order->finished, 1) == static_cast<int>(gridDim.x) - 1) {
    order->taken = 0;
    order->finished = 0;
  }
}

// Copies every second key tile of the ring. Each of two warps runs one: a single warp starts boxes
// of 16 keys too slowly.
template <class Config>
class KeyCopier {
 public:
  using SharedMemory = typename Config::SharedMemory;
  __device__ KeyCopier(const PrefillParams& params, SharedMemory& shared, int rank)
      : params_(params), shared_(shared), rank_(rank), segment_(wait_for_tile()) {
    block_ = segment_.last;
  }

  __device__ void run() {
    if (rank_ == 1) advance();
    BoxPlace place = find();
    wait_for_previous_kernel();
    while (!ended()) {
      // Page ids are prefetched unless that would wait for the next row tile.
      const bool ahead = has_two_more();
      const KeyCopier now = *this;
      BoxPlace next;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        if ((i == 0) == ahead) {
          advance();
          advance();
          next = find();
        } else {
          now.copy(place);
        }
      }
      place = next;
    }
  }

 private:
  __device__ const WorkTile& wait_for_tile() {
    shared_.tile_full[slots_.stage].wait(slots_.phase);
    return work();
  }
  __device__ const WorkTile& work() const { return shared_.tiles[slots_.stage].work; }
  __device__ bool ended() const { return work().request < 0; }
  __device__ BoxPlace find() const {
    return ended() ? BoxPlace{} : box_place<Config>(params_, work(), block_, threadIdx.x % 32);
  }
  // Returns whether the row tile has two more key tiles.
  __device__ bool has_two_more() const {
    const int left = block_ - segment_.first + (values_ ? 0 : segment_.count());
    return left >= 2 || segment_.first > segment_.begin;
  }
  __device__ void copy(const BoxPlace& place) const {
    shared_.empty[at_.stage].wait(at_.phase ^ 1);
    // Other blocks read the same keys only when a group has several row tiles.
    const BatchParams& batch = params_.attention.batch;
    const bool once = batch.q_heads == batch.kv_heads << params_.heads_shift;
    load_key_tile<Config>(params_, values_ ? params_.v : params_.k, work(), block_, place,
                          static_cast<int>(threadIdx.x) % 32, once ? kEvictFirst : kEvictNormal,
                          shared_.stages[at_.stage], shared_.full[at_.stage]);
  }
  __device__ void advance() {
    if (ended()) return;
    at_.advance();
    if (--block_ >= segment_.first) return;
    values_ = !values_;
    if (!values_) segment_.advance();
    if (segment_.done()) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared_.tile_empty[slots_.stage].arrive();
      slots_.advance();
      segment_ = SegmentWalk<Config>(wait_for_tile());
    }
    block_ = segment_.last;
  }

  const PrefillParams& params_;
  SharedMemory& shared_;
  const int rank_;
  Ring<kTileSlots> slots_;
  Ring<Config::kStages> at_;
  SegmentWalk<Config> segment_;
  int block_;
  bool values_ = false;
};

}  // namespace fovea::kernels::cuda
